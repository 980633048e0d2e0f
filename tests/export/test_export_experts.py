"""Exports of adapters on experts: what PEFT computes comes back from the layouts that have a place for them."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from longtune.errors import UserError
from longtune.export import Request, export
from longtune.model.adapters import add_lora, save_adapter
from tests.model.test_experts import stirred, tiny

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
