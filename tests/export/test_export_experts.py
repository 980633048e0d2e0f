"""Exports of adapters on experts: what PEFT computes comes back from the layouts that have a place for them."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from longtune.errors import UserError
from longtune.export import Request, export, mlx_check
from longtune.model.adapters import add_lora, save_adapter
from longtune.model.loading import load_model
from tests import support
from tests.model.test_experts import FAMILIES as STACKED
from tests.model.test_experts import stirred, tiny

needs_mlx = pytest.mark.skipif(not mlx_check.installed(), reason="needs mlx-lm, the reader of what is written")

FAMILIES = {
    "qwen3_moe": {},
    "mixtral": STACKED["mixtral"],
    # mlx-lm rounds the bounds of YaRN, which this architecture has by default.
    "gpt_oss": dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": {},
    "glm4_moe": dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1, n_group=1
    ),
}

TOKENS = torch.arange(6, 30)[None]


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def saved(request, base, tmp_path_factory):
    """A model's folder and two adapters of its experts: of uneven ranks on all, and with rsLoRA on some."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny(request.param, torch.float32, vocab_size=262)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "model")
    settings = {
        "all": {"targets": ["all-linear", "experts"], "rank_policy": "by_kl"},
        "some": {"targets": ["experts.down_proj", "q_proj"], "layers": "last 1", "rslora": True},
    }
    for name, chosen in settings.items():
        plain = load(folder / "model")
        kl = {path: float(number % 5 + 1) for number, (path, _) in enumerate(plain.named_parameters())}
        save_adapter(stirred(add_lora(plain, rank=3, alpha=6, kl=kl, **chosen)), folder / name)
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def truth(saved, name):
    return logits(PeftModel.from_pretrained(load(saved / "model"), str(saved / name)))


def made(saved, name, out, **settings):
    return export(Request(adapter=saved / name, model=str(saved / "model"), out=out, **{"to": "peft", **settings}))


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["all", "some"])
@pytest.mark.parametrize("settings", [{}, {"even_ranks": True}])
def test_peft_loads_what_was_exported_for_it(saved, name, settings, tmp_path):
    done = made(saved, name, tmp_path / "out", **settings)
    assert done.difference.passes and done.difference.effect > 1e-3
    close(logits(PeftModel.from_pretrained(load(saved / "model"), str(tmp_path / "out"))), truth(saved, name))
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (saved / name, tmp_path / "out"))
    assert old.keys() == new.keys()
    assert settings or all(torch.equal(old[key], new[key]) for key in old)


@pytest.mark.parametrize("name", ["all", "some"])
def test_a_merged_model_is_base_plus_adapter(saved, name, tmp_path):
    done = made(saved, name, tmp_path / "out", to="merged", dtype="fp32")
    assert done.difference.passes
    close(logits(load(tmp_path / "out")), truth(saved, name))


@needs_mlx
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_and_longtune_read_a_merged_model_with_experts(family, base, tmp_path):
    model = support.tiny_model(family, torch.float32, vocab_size=262, **FAMILIES[family])
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "model")
    adapted = add_lora(load(tmp_path / "model"), rank=2, alpha=4, targets=["all-linear", "experts"])
    save_adapter(stirred(adapted), tmp_path / "adapter")
    done = made(tmp_path, "adapter", tmp_path / "out", to="mlx-merged", dtype="fp32")
    assert done.checked_by == "mlx-lm" and done.difference.passes and done.difference.effect > 1e-2, done.notes
    close(logits(load_model(str(tmp_path / "out"), dtype="float32", device="cpu").model), truth(tmp_path, "adapter"))


@needs_mlx
def test_an_architecture_that_mlx_lm_lacks_is_refused_before_anything_is_written(saved, monkeypatch, tmp_path):
    assert not mlx_check.knows({"model_type": "flex_olmo"}) and mlx_check.knows({"model_type": "mistral"})
    monkeypatch.setattr(mlx_check, "knows", lambda config: config["model_type"] == "flex_olmo")
    with pytest.raises(UserError, match=r"mlx-lm, as it is installed here, has no architecture '\w+' -> pip install"):
        made(saved, "some", tmp_path / "out", to="mlx-merged")
    assert not list(tmp_path.iterdir())
    assert made(saved, "some", tmp_path / "out", to="merged").difference.passes


def test_two_adapters_become_their_sum(saved, tmp_path):
    done = made(saved, "all", tmp_path / "both", others=((saved / "some", 0.5),))
    assert done.difference.passes
    merged = made(saved, "all", tmp_path / "merged", others=((saved / "some", 0.5),), to="merged", dtype="fp32")
    assert merged.difference.passes
    found = logits(PeftModel.from_pretrained(load(saved / "model"), str(tmp_path / "both")))
    close(found, logits(load(tmp_path / "merged")))
    assert float((found - truth(saved, "all")).abs().max()) > 1e-3


def test_layouts_without_a_place_for_them_are_refused(saved, tmp_path):
    with pytest.raises(UserError, match=r"experts\.(gate_up|down)_proj: adapts experts"):
        made(saved, "all", tmp_path / "out", to="mlx")
    with pytest.raises(UserError, match="gguf-lora"):
        made(saved, "all", tmp_path / "out", to="gguf-lora")
    assert not (tmp_path / "out").exists()
