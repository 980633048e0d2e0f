"""Exports compute what base + adapter computes, by the readers that they are for; what can't be written is refused."""

import importlib
import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from longtune.cli import app
from longtune.errors import UserError
from longtune.export import ExportFailed, Request, export, merged, mlx_check, peft, verify
from longtune.export.combine import combined, even, of_one_scale
from longtune.model.adapter_files import Update, linear_sizes, named_for, read_updates
from longtune.model.adapters import add_lora, init_adapter, load_adapter, save_adapter
from longtune.model.loading import load_model
from longtune.model.targets import choose_targets
from support import ARCHITECTURES, tiny_model
from tests.model.packed.support import write_plain

TOKENS = torch.arange(6, 30)[None]
KINDS = ["even", "uneven", "rslora", "some"]

needs_mlx = pytest.mark.skipif(not mlx_check.installed(), reason="needs mlx and mlx-lm")


def plain(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def with_peft(base, *folders):
    """Logits of the base under adapters that peft loads; several are added up."""
    model = PeftModel.from_pretrained(plain(base), str(folders[0]), adapter_name="a0").eval()
    names = ["a0"]
    for number, folder in enumerate(folders[1:], 1):
        names.append(f"a{number}")
        model.load_adapter(str(folder), adapter_name=names[-1])
    model.base_model.set_adapter(names)
    with torch.no_grad():
        return model(TOKENS).logits


def plain_logits(folder):
    with torch.no_grad():
        return plain(folder)(TOKENS).logits


def made(base, adapter, out, **settings):
    return export(Request(adapter=adapter, model=str(base), out=out, **{"to": "peft", **settings}))


def close(found, truth, within=1e-6):
    torch.testing.assert_close(found, truth, rtol=within, atol=within * float(truth.abs().max().clamp(min=1)))


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_compute_what_peft_computes(base, adapters, kind):
    model = plain(base)
    updates = named_for(read_updates(adapters[kind]), model)
    close(verify.logits(model, TOKENS, updates), with_peft(base, adapters[kind])[0])
    close(verify.logits(model, TOKENS), plain_logits(base)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"even_ranks": True}])
def test_peft_loads_what_was_exported_for_it(base, adapters, kind, settings, tmp_path):
    done = made(base, adapters[kind], tmp_path / "out", **settings)
    close(with_peft(base, tmp_path / "out"), with_peft(base, adapters[kind]))
    assert done.difference.passes and done.difference.effect > 0.1 and done.checked_by == "peft"
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    if settings:
        assert not config["rank_pattern"]
        assert (
            len(
                {
                    t.shape[0]
                    for n, t in load_file(tmp_path / "out" / "adapter_model.safetensors").items()
                    if "lora_A" in n
                }
            )
            == 1
        )
    elif kind == "rslora":
        assert config["use_rslora"] and config["rank_pattern"] and not config["alpha_pattern"]
    elif kind == "uneven":
        assert config["rank_pattern"].keys() == config["alpha_pattern"].keys()
    if kind == "some":
        assert list(config["target_modules"]) != ["q_proj", "down_proj"], "other layers have those, too"


def test_an_export_as_it_is_keeps_every_bit(base, adapters, tmp_path):
    made(base, adapters["uneven"], tmp_path / "out")
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (adapters["uneven"], tmp_path / "out"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_is_base_plus_adapter(base, adapters, kind, tmp_path):
    done = made(base, adapters[kind], tmp_path / "out", to="merged", dtype="fp32")
    close(plain_logits(tmp_path / "out"), with_peft(base, adapters[kind]), 3e-6)
    assert done.difference.passes
    assert load_model(str(tmp_path / "out"), dtype="float32", device="cpu").tokenizer.chat_template


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "phi3"])
@pytest.mark.parametrize("tied", [False, True])
def test_any_architecture_comes_back_whole(family, tied, tmp_path):
    model = tiny_model(family, torch.float32, tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(0)
    updates = {}
    for name in choose_targets(model):
        inner, outer = linear_sizes(model.get_submodule(name))
        down, up = torch.randn(2, inner, generator=generator), torch.randn(outer, 2, generator=generator)
        updates[name] = Update(down, up, 0.02)
    truth = verify.logits(model, TOKENS, updates)
    assert float((truth - verify.logits(model, TOKENS)).abs().max()) > 1e-3
    merged.write(tmp_path / "out", model, updates, dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation=model.config._attn_implementation
    )
    close(verify.logits(again.eval(), TOKENS), truth, 1e-5)


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_merged_weights_are_added_in_fp32_and_rounded_once(base, adapters, dtype, stored, tmp_path):
    made(base, adapters["rslora"], tmp_path / "out", to="merged", dtype=dtype)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    model = plain(base)
    updates = named_for(read_updates(adapters["rslora"]), model)
    for name, update in updates.items():
        exact = model.get_submodule(name).weight.detach() + update.delta()
        assert torch.equal(weights[f"{name}.weight"], exact.to(stored)), name
    assert {tensor.dtype for tensor in weights.values()} == {stored}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")


def test_two_merges_one_after_the_other_are_the_merge_of_both(base, adapters, tmp_path):
    made(base, adapters["uneven"], tmp_path / "first", to="merged", dtype="fp32")
    made(tmp_path / "first", adapters["rslora"], tmp_path / "second", to="merged", dtype="fp32")
    made(base, adapters["uneven"], tmp_path / "both", to="merged", dtype="fp32", others=((adapters["rslora"], 1.0),))
    truth = with_peft(base, adapters["uneven"], adapters["rslora"])
    close(plain_logits(tmp_path / "second"), truth, 3e-6)
    close(plain_logits(tmp_path / "both"), truth, 3e-6)


def test_adapters_combine_by_concatenation(base, adapters, tmp_path):
    done = made(base, adapters["uneven"], tmp_path / "out", others=((adapters["rslora"], 1.0), (adapters["some"], 1.0)))
    close(
        with_peft(base, tmp_path / "out"), with_peft(base, *(adapters[k] for k in ("uneven", "rslora", "some"))), 3e-6
    )
    ranks = [
        read_updates(folder).ranks
        for folder in (tmp_path / "out", *(adapters[k] for k in ("uneven", "rslora", "some")))
    ]
    assert ranks[0] == {name: sum(each.get(name, 0) for each in ranks[1:]) for name in ranks[0]}
    assert done.difference.passes


def test_weights_scale_the_other_adapter_and_a_negative_one_takes_it_away(base, adapters, tmp_path):
    made(base, adapters["even"], tmp_path / "none", others=((adapters["even"], -1.0),))
    close(with_peft(base, tmp_path / "none"), plain_logits(base), 3e-6)
    model = plain(base)
    made(base, adapters["even"], tmp_path / "half", others=((adapters["uneven"], 0.5),))
    parts = [named_for(read_updates(adapters[kind]), model) for kind in ("even", "uneven")]
    halved = {name: Update(u.down_RI, u.up_OR, u.scale * 0.5) for name, u in parts[1].items()}
    with verify.added_all(model, [parts[0], halved]):
        close(with_peft(base, tmp_path / "half")[0], verify.logits(model, TOKENS))


def test_equal_scales_change_no_number_when_adapters_are_combined():
    def update(rank):
        return Update(torch.randn(rank, 5), torch.randn(7, rank), 1.5)

    first, second = {"a": update(2), "b": update(3)}, {"a": update(1)}
    both = combined([(first, 1.0), (second, 1.0)])
    assert torch.equal(both["a"].up_OR, torch.cat([first["a"].up_OR, second["a"].up_OR], 1))
    assert torch.equal(both["a"].down_RI, torch.cat([first["a"].down_RI, second["a"].down_RI]))
    assert torch.equal(both["b"].up_OR, first["b"].up_OR) and both["a"].scale == 1.5


def test_padding_and_one_scale_keep_every_delta():
    generator = torch.Generator().manual_seed(0)
    updates = {
        f"m{rank}": Update(
            torch.randn(rank, 6, generator=generator), torch.randn(4, rank, generator=generator), 8 / rank**0.5
        )
        for rank in (1, 2, 5, 5)
    }
    changed = of_one_scale(even(updates))
    assert {update.rank for update in changed.values()} == {5} and len({u.scale for u in changed.values()}) == 1
    for name, update in updates.items():
        torch.testing.assert_close(changed[name].delta(), update.delta(), rtol=1e-6, atol=1e-6)


@needs_mlx
@pytest.mark.parametrize("kind", KINDS)
def test_mlx_lm_loads_the_adapter_with_equal_logits(base, adapters, kind, tmp_path):
    done = made(base, adapters[kind], tmp_path / "out", to="mlx")
    assert done.checked_by == "mlx-lm" and done.difference.largest < 1e-5 * done.difference.scale
    found, _ = mlx_check.logits(base, TOKENS, tmp_path / "out")
    close(found, with_peft(base, adapters[kind])[0], 1e-5)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["num_layers"] == (1 if kind == "some" else 2)
    assert config["lora_parameters"]["rank"] == max(read_updates(adapters[kind]).ranks.values())


@needs_mlx
def test_mlx_lm_loads_the_merged_model_with_equal_logits(base, adapters, tmp_path):
    done = made(base, adapters["rslora"], tmp_path / "out", to="mlx-merged", dtype="fp32")
    assert done.checked_by == "mlx-lm"
    found, _ = mlx_check.logits(tmp_path / "out", TOKENS)
    close(found, with_peft(base, adapters["rslora"])[0], 1e-5)


@needs_mlx
def test_a_rotary_theta_that_mlx_lm_would_misread_is_written_so_that_it_is_read(adapters, base, tmp_path):
    turned = tmp_path / "turned"
    shutil.copytree(base, turned)
    config = json.loads((turned / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 123.0, "rope_type": "default"}
    (turned / "config.json").write_text(json.dumps(config))
    done = made(turned, adapters["even"], tmp_path / "adapter", to="mlx")
    assert done.checked_by == "longtune" and "even without an adapter" in " ".join(done.notes)
    assert made(turned, adapters["even"], tmp_path / "out", to="mlx-merged", dtype="fp32").checked_by == "mlx-lm"


@needs_mlx
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("to", ["mlx", "mlx-merged"])
def test_a_model_that_mlx_lm_can_not_run_is_said_so(to, packed, tmp_path):
    """It takes every sixth layer of Gemma 3 for one with full attention, whatever the config says."""
    write_plain(tmp_path / "model", "gemma3_text")
    if packed:
        arguments = [
            "quantise",
            str(tmp_path / "model"),
            "--uniform",
            "--group-size",
            "32",
            "--out",
            str(tmp_path / "q"),
        ]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    model = tmp_path / ("q" if packed else "model")
    made_of = add_lora(load_model(str(model), dtype="float32", device="cpu").model, rank=2, alpha=4)
    save_adapter(made_of, tmp_path / "adapter")
    done = made(model, tmp_path / "adapter", tmp_path / "out", to=to)
    assert done.checked_by == "longtune" and done.difference.passes
    assert any("mlx-lm can't run" in note and "Error" in note for note in done.notes), done.notes


@pytest.mark.parametrize("kind", ["uneven", "some"])
def test_an_adapter_in_mlx_lms_layout_is_a_source_and_a_warm_start(base, adapters, kind, tmp_path):
    made(base, adapters[kind], tmp_path / "mlx", to="mlx")
    made(base, tmp_path / "mlx", tmp_path / "back")
    close(with_peft(base, tmp_path / "back"), with_peft(base, adapters[kind]), 3e-6)
    ranks = set(read_updates(tmp_path / "mlx").ranks.values())
    assert len(ranks) == 1
    targets = {} if kind == "uneven" else {"targets": ["q_proj", "down_proj"], "layers": "last 1"}
    started = add_lora(plain(base), rank=ranks.pop(), alpha=3, **targets).eval()
    init_adapter(started, tmp_path / "mlx")
    with torch.no_grad():
        close(started(TOKENS).logits, with_peft(base, adapters[kind]), 3e-6)


def test_a_warm_start_from_mlx_names_what_does_not_fit(base, adapters, tmp_path):
    made(base, adapters["some"], tmp_path / "mlx", to="mlx")
    with pytest.raises(UserError) as caught:
        init_adapter(add_lora(plain(base), rank=3, alpha=3, targets=["q_proj", "up_proj"]), tmp_path / "mlx")
    with pytest.raises(UserError, match=r"mlx-lm's layout -> longtune export"):
        load_adapter(plain(base), tmp_path / "mlx")
    text = str(caught.value)
    assert "model.layers.1.self_attn.q_proj.lora_A: [4, 32] there, [3, 32] here" in text
    assert "nothing here" in text and "nothing there" in text


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpps_layout_holds_the_same_updates(base, adapters, kind, tmp_path):
    pytest.importorskip("gguf")
    done = made(base, adapters[kind], tmp_path / "out", to="gguf-lora")
    assert done.difference.passes and list(done.files) == ["adapter.gguf", "longtune_export.json"]


def test_llama_cpps_rows_are_those_of_a_real_converted_model(tmp_path):
    """A GGUF that llama.cpp's converter wrote, against the same weights as transformers reads them."""
    gguf = pytest.importorskip("gguf")
    from longtune.export.gguf_lora import _reordered
    from longtune.model.embedded import embedded_folder, find_gguf

    file = find_gguf()
    if file is None:
        pytest.skip("needs the package of the embedded model")
    folder = embedded_folder()
    config = json.loads((folder / "config.json").read_text())
    ours = load_file(folder / "model.safetensors")
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj"}
    found = {t.name: t for t in gguf.GGUFReader(file).tensors if t.name.startswith("blk.7.attn_")}

    class Heads:
        num_attention_heads, num_key_value_heads = config["num_attention_heads"], config["num_key_value_heads"]

    for theirs, mine in names.items():
        tensor = found[f"blk.7.{theirs}.weight"]
        there = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        here = ours[f"model.layers.7.self_attn.{mine}.weight"].float()
        moved = _reordered(here, f"blk.7.{theirs}.weight", "llama", Heads)
        torch.testing.assert_close(moved, there, rtol=1e-2, atol=1e-3)
        assert torch.equal(moved, here) == (theirs == "attn_v")


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "starcoder2"]
)
def test_every_family_of_llama_cpp_comes_back_through_transformers_reader(family, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from longtune.export import gguf_lora

    assert set(gguf_lora.ARCHITECTURES) >= {family}
    monkeypatch.setitem(ARCHITECTURES, family, ARCHITECTURES.get(family, {}))
    model = tiny_model(family, torch.float32)
    generator = torch.Generator().manual_seed(0)
    updates = {}
    for number, name in enumerate(choose_targets(model)):
        (inner, outer), rank = linear_sizes(model.get_submodule(name)), 1 + number % 3
        down, up = torch.randn(rank, inner, generator=generator), torch.randn(outer, rank, generator=generator)
        updates[name] = Update(down, up, 0.3 * rank)
    gguf_lora.write(tmp_path, model, updates, base="base")
    found = gguf_lora.read(tmp_path / "adapter.gguf", model)
    assert found.keys() == updates.keys()
    for name, update in updates.items():
        torch.testing.assert_close(found[name].delta(), update.delta(), rtol=1e-5, atol=1e-5)


def test_a_family_of_unknown_layout_is_refused_for_llama_cpp():
    from longtune.export.gguf_lora import check

    with pytest.raises(UserError, match="gpt_oss"):
        check(tiny_model("gpt_oss"))


def test_nothing_is_overwritten_unasked_and_nothing_but_an_export_ever(base, adapters, tmp_path):
    out = tmp_path / "out"
    made(base, adapters["even"], out)
    before = (out / "adapter_model.safetensors").read_bytes()
    with pytest.raises(UserError, match="--force"):
        made(base, adapters["uneven"], out)
    assert (out / "adapter_model.safetensors").read_bytes() == before
    made(base, adapters["uneven"], out, force=True)
    assert (out / "adapter_model.safetensors").read_bytes() != before
    assert json.loads((out / "longtune_export.json").read_text())["base"] == str(base)
    precious = tmp_path / "precious"
    (precious / "deeper").mkdir(parents=True)
    (precious / "longtune_export.json").touch()
    # A model or an adapter that is no export looks much like one.
    shutil.copytree(base, tmp_path / "model")
    shutil.copytree(adapters["some"], tmp_path / "trained")
    for theirs in (precious, tmp_path / "model", tmp_path / "trained"):
        with pytest.raises(UserError, match="something else"):
            made(base, adapters["even"], theirs, force=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(precious)
    for name in ("file", "link"):
        with pytest.raises(UserError, match="is no folder"):
            made(base, adapters["even"], tmp_path / name, force=True)
    for source in (adapters["even"], adapters["even"].parent, base):
        with pytest.raises(UserError, match="which is read"):
            made(base, adapters["even"], source, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "model", "out", "precious", "trained"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
@pytest.mark.parametrize("to", ["peft", "merged", "mlx-merged"])
def test_a_full_disk_is_named_and_leaves_nothing(error, to, base, adapters, tmp_path, monkeypatch):
    def full(folder, *_, **__):
        (folder / "half").write_bytes(b"half")
        raise error

    monkeypatch.setattr(importlib.import_module(f"longtune.export.{to.replace('-', '_')}"), "write", full)
    with pytest.raises(UserError, match=r"--out .*out: can't be written \(No space left on device\)"):
        made(base, adapters["even"], tmp_path / "out", to=to)
    assert not list(tmp_path.iterdir())


def test_adapters_of_different_bases_are_told(base, adapters, tmp_path):
    other = shutil.copytree(adapters["some"], tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "x/another"}))
    done = made(base, adapters["even"], tmp_path / "out", others=((other, 1.0),))
    told = f"the adapters name different base models: {adapters['even']} {base}, {other} x/another"
    assert done.notes == [told]
    assert not made(base, adapters["even"], tmp_path / "same").notes


def test_an_adapter_that_was_made_for_another_base_is_told(base, adapters, tmp_path):
    other = shutil.copytree(base, tmp_path / "other")
    told = f"{adapters['even']} was made for {base}, and is exported for {other}: the shapes are the same"
    assert [note[: len(told)] for note in made(other, adapters["even"], tmp_path / "out").notes] == [told]
    # A folder that was moved keeps its name, and one that is named another way is the same.
    moved = shutil.copytree(base, tmp_path / "deep" / base.name)
    assert not made(moved, adapters["even"], tmp_path / "again").notes
    (tmp_path / "link").symlink_to(base)
    assert len(made(tmp_path / "link", adapters["even"], tmp_path / "linked").notes) == 1


@pytest.mark.parametrize("to", ["merged", "mlx-merged", "peft"])
def test_a_failure_that_rounding_explains_names_the_way_out(to, base, adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "ROUNDED", dict.fromkeys(verify.ROUNDED, 1e-9))
    monkeypatch.setattr(verify, "LOSSLESS", dict.fromkeys(verify.LOSSLESS, 1e-9))
    with pytest.raises(ExportFailed, match=r"rounding to bfloat16, --dtype fp32 rounds nothing"):
        made(base, adapters["even"], tmp_path / "out", to=to, dtype="bf16")
    with pytest.raises(ExportFailed, match=r"to be looked at$"):
        made(base, adapters["even"], tmp_path / "other", to="merged", dtype="fp32")


def test_an_artefact_that_computes_something_else_fails_and_is_set_aside(base, adapters, tmp_path, monkeypatch):
    def forgetful(folder, updates, **settings):
        write(folder, {n: Update(u.down_RI, u.up_OR, u.scale * 1.01) for n, u in updates.items()}, **settings)

    write = peft.write
    monkeypatch.setattr(peft, "write", forgetful)
    with pytest.raises(ExportFailed, match=r"out\.failed differs"):
        made(base, adapters["even"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.failed"]


def test_not_a_number_never_passes():
    logits = torch.randn(3, 5)
    assert verify.compare(logits, logits, logits, 1e-4).passes
    assert not verify.compare(logits, logits, logits * float("nan"), 1e-4).passes
    assert not verify.compare(logits, logits, logits[:, :4], 1e-4).passes


def test_one_module_of_rank_one_is_an_adapter(base, tmp_path):
    (tmp_path / "one").mkdir()
    name = "model.layers.1.mlp.up_proj"
    peft.write(
        tmp_path / "one",
        {name: Update(torch.ones(1, 32), torch.ones(48, 1), 0.5)},
        targets=[name],
        base="",
        rslora=True,
    )
    for to in ("peft", "merged", "mlx", "gguf-lora"):
        done = made(
            base, tmp_path / "one", tmp_path / "deep" / "er" / to, to=to, dtype=None if to != "merged" else "fp32"
        )
        assert done.difference.passes and done.difference.effect > 1e-3


def test_a_place_that_can_not_be_made_is_named(base, adapters, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can't be written"):
        made(base, adapters["some"], tmp_path / "file" / "out")
    with pytest.raises(UserError, match="names no folder"):
        made(base, adapters["some"], tmp_path.__class__("."))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"to": "onnx"}, "unknown"),
        ({"dtype": "int8"}, "unknown"),
        ({"requantise": True}, "only a merged MLX"),
        ({"to": "mlx-merged", "requantise": True}, "no quantised MLX checkpoint"),
        ({"to": "gguf-lora", "dtype": "bf16"}, "fp32 or fp16"),
        ({"to": "mlx", "even_ranks": True}, "no meaning"),
    ],
)
def test_what_can_not_be_written_is_refused_with_a_reason(base, adapters, settings, said, tmp_path):
    with pytest.raises(UserError, match=said):
        made(base, adapters["even"], tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


def broken(adapters, folder, change_config=None, change_tensors=None, kind="even"):
    shutil.copytree(adapters[kind], folder)
    if change_config:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change_config}))
    if change_tensors:
        file = folder / "adapter_model.safetensors"
        tensors = change_tensors(load_file(file))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"use_dora": True}, None, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, None, "whole modules"),
        ({"bias": "all"}, None, "biases"),
        ({"r": 3}, None, "has rank 4"),
        (None, lambda t: {n: x for n, x in t.items() if n != Q}, "has no A"),
        (None, lambda t: {**t, "stray": torch.zeros(2)}, "stray"),
        (None, lambda t: {**t, Q: t[Q][:, :5]}, "the model's side is 32"),
        (None, lambda t: {**t, Q: t[Q][:3]}, "two ranks"),
        (None, lambda t: {n.replace("layers.1", "layers.7"): x for n, x in t.items()}, "the model has not"),
        (None, lambda t: {}, "no tensors"),
        ({"lora_alpha": 0}, None, "scale"),
    ],
)
def test_adapters_that_are_not_whole_or_not_plain_are_named(base, adapters, config, tensors, said, tmp_path):
    folder = broken(adapters, tmp_path / "bad", config, tensors)
    with pytest.raises(UserError, match=said):
        made(base, folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize("text", ["{", "[]", '{"fine_tune_type": "dora"}', '{"lora_parameters": {"rank": 4}}'])
def test_configs_that_mlx_lm_could_not_have_written_are_named(base, adapters, text, tmp_path):
    made(base, adapters["even"], tmp_path / "mlx", to="mlx")
    (tmp_path / "mlx" / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        read_updates(tmp_path / "mlx")


def test_a_weight_that_is_shared_is_not_merged_into(adapters):
    from longtune.export.merged import check_mergeable

    model = tiny_model("llama", torch.float32, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"shares its weight with model\.embed_tokens"):
        check_mergeable(model, {"lm_head": Update(torch.zeros(2, 32), torch.zeros(97, 2), 1.0)})
