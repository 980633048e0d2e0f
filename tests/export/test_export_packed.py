"""Exports from bases that mlx-lm or bitsandbytes quantised: merged into their numbers or packed again; ranks too."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from longtune.export import Request, export, mlx_check, verify
from longtune.model.adapter_files import named_for, read_updates
from longtune.model.adapters import add_lora
from longtune.model.loading import load_model
from longtune.model.packed.storage import bits_of, dequantise
from longtune.model.packed.writer import with_older_keys
from longtune.model.rank_sources import find_figures, lora_ranks

needs_mlx = pytest.mark.skipif(not mlx_check.installed(), reason="needs mlx and mlx-lm")

TOKENS = torch.arange(6, 30)[None]
SIX = {"model.layers.1.self_attn.v_proj"}
PLAIN = {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
"""Rows of 48 are no whole groups of 32."""


@pytest.fixture(scope="module")
def packed(base, tmp_path_factory):
    """The base in mlx-lm's mixed_4_6 recipe: 6 bits for the value projection of the last layer, and the head."""
    from mlx_lm import convert

    folder = tmp_path_factory.mktemp("packed") / "model"
    convert(str(base), str(folder), quantize=True, q_group_size=32, quant_predicate="mixed_4_6")
    return folder


def load(folder):
    return load_model(str(folder), dtype="float32", device="cpu").model


def made(base, adapter, out, **settings):
    return export(Request(adapter=adapter, model=str(base), out=out, **settings))


def truth(base, adapter):
    model = load(base)
    return verify.logits(model, TOKENS, named_for(read_updates(adapter), model))


def close(found, expected, within=1e-5):
    torch.testing.assert_close(found, expected, rtol=within, atol=within * float(expected.abs().max().clamp(min=1)))


@needs_mlx
def test_ranks_follow_the_widths_of_a_real_mixed_checkpoint(packed):
    model = load(packed)
    figures = find_figures(model, packed, policy="by_bits")
    ranks = lora_ranks(model, figures, rank=8, policy="by_bits")
    assert len(ranks.by_name) == 14 and set(ranks.by_name) - set(ranks.bits) == PLAIN
    assert {name for name, rank in ranks.by_name.items() if rank == 12} == SIX
    assert {rank for name, rank in ranks.by_name.items() if name not in SIX} == {8}
    # by_kl without figures says so, and goes by the same widths.
    fallen = lora_ranks(model, find_figures(model, packed), rank=8, policy="by_kl")
    assert fallen.by_name == ranks.by_name and "no sensitivities" in fallen.notes[0]
    adapted = add_lora(model, rank=8, alpha=16, rank_policy="by_bits", bits=figures.bits)
    found = {name.split(".lora_A")[0].removeprefix("base_model.model."): p for name, p in adapted.named_parameters()}
    assert all(found[name].shape[0] == 12 for name in SIX)


@needs_mlx
@pytest.mark.parametrize("to", ["peft", "mlx", "merged", "mlx-merged"])
@pytest.mark.parametrize("kind", ["uneven", "rslora"])
def test_exports_compute_what_the_packed_base_with_the_adapter_computes(packed, adapters, to, kind, tmp_path):
    done = made(packed, adapters[kind], tmp_path / "out", to=to, dtype="fp32" if "merged" in to else None)
    assert done.difference.passes and done.difference.effect > 0.1
    if to == "merged":
        model = load(tmp_path / "out")
        assert not getattr(model, "is_quantized", False)
        close(verify.logits(model, TOKENS), truth(packed, adapters[kind]))
    elif to == "mlx-merged":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert "quantization" not in config and "quantization_config" not in config
        found, _ = mlx_check.logits(tmp_path / "out", TOKENS)
        close(found, truth(packed, adapters[kind]))
    elif to == "mlx":
        assert done.checked_by == "mlx-lm"
        found, _ = mlx_check.logits(packed, TOKENS, tmp_path / "out")
        close(found, truth(packed, adapters[kind]))


@needs_mlx
def test_merged_weights_stay_packed_in_their_own_formats_when_asked(packed, adapters, tmp_path):
    done = made(packed, adapters["uneven"], tmp_path / "out", to="mlx-merged", requantise=True)
    assert (
        done.checked_by == "mlx-lm" and done.difference.passes and "packing the merged weights" in " ".join(done.notes)
    )
    before, after = (dict(load(folder).named_modules()) for folder in (packed, tmp_path / "out"))
    updates = read_updates(adapters["uneven"]).by_name
    for name, module in before.items():
        if not hasattr(module, "stored_bits"):
            continue
        assert bits_of(after[name]) == bits_of(module) and after[name].format == module.format
        if name in updates:
            exact = dequantise(module, torch.float32) + updates[name].delta()
            step = exact.view(-1, 32).amax(-1) - exact.view(-1, 32).amin(-1)
            error = (dequantise(after[name], torch.float32) - exact).view(-1, 32).abs().amax(-1)
            assert bool((error <= 1.1 * step / (2 ** bits_of(module) - 1) + 1e-6).all()), name
        else:
            assert torch.equal(after[name].weight, module.weight), name
    sizes = [sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (packed, tmp_path / "out")]
    assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[0]
    for name in PLAIN:
        exact = before[name].weight + updates[name].delta()
        assert torch.equal(after[name].weight, exact), name


@pytest.mark.libraries
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_base_of_bitsandbytes_is_dequantised_before_it_is_merged(base, adapters, kind, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")
    stored = tmp_path / "stored"
    settings: dict = {"load_in_8bit": True}
    if kind == "nf4":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    made_small = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.float32, device_map="cpu"
    )
    made_small.save_pretrained(stored)
    AutoTokenizer.from_pretrained(base).save_pretrained(stored)
    done = made(stored, adapters["uneven"], tmp_path / "out", to="merged", dtype="fp32")
    assert done.difference.largest <= 1e-5 * done.difference.scale
    (note,) = done.notes  # The adapter was trained on the plain base.
    assert f"was made for {base}" in note
    merged, small = (dict(load(folder).named_modules()) for folder in (tmp_path / "out", stored))
    for name, update in read_updates(adapters["uneven"]).by_name.items():
        exact = dequantise(small[name], torch.float32) + update.delta()
        torch.testing.assert_close(merged[name].weight, exact, rtol=1e-6, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_older_keys_of_rotary_embeddings_are_added_and_none_is_changed():
    scaled = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}, "rope_theta": 7.0}
    found = with_older_keys({"text_config": scaled, "a": 1})
    assert found["a"] == 1
    assert found["text_config"]["rope_theta"] == 7.0
    assert found["text_config"]["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert with_older_keys({"rope_parameters": {"rope_theta": 3.0}})["rope_theta"] == 3.0
    assert with_older_keys({"rope_parameters": {"full_attention": {"rope_theta": 3.0}}}).keys() == {"rope_parameters"}
