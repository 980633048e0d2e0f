"""Adapters of experts that are stored as one tensor: what plain PEFT computes, in chunks, in files, in less memory."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from longtune.engine import Engine, Plan
from longtune.errors import UserError
from longtune.model.adapter_files import named_for, read_updates
from longtune.model.adapters import adapters_disabled, add_lora, init_adapter, load_adapter, save_adapter
from longtune.model.expert_lora import Adapted, ParamWrapper
from longtune.model.experts import find_stacks, joined, split
from longtune.model.reference import fingerprint, load_reference, reference_active
from longtune.tree import Forest
from tests import support
from tests.engine.test_trace import ghost_peak, real_peak

GEMMA = dict(num_experts=4, top_k_experts=2, moe_intermediate_size=24, enable_moe_block=True)
FAMILIES = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "gemma4_text": GEMMA,
}
TOKENS = torch.arange(5, 25)[None]


def tiny(family, dtype=torch.float64, **changes):
    return support.tiny_model(family, dtype, **{**FAMILIES[family], **changes})


def stirred(model):
    """Adapters that do something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def adapted(family, dtype=torch.float64, **settings):
    model = tiny(family, dtype)
    return stirred(add_lora(model, **{"rank": 3, "alpha": 6, "targets": ["all-linear", "experts"], **settings}))


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def peft_again(family, folder, dtype=torch.float64, **settings):
    return PeftModel.from_pretrained(tiny(family, dtype), str(folder), autocast_adapter_dtype=False, **settings).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_through_chunks_are_those_of_plain_peft(family, tmp_path):
    model = adapted(family)
    save_adapter(model, tmp_path / "saved")
    plain = peft_again(family, tmp_path / "saved", is_trainable=True)
    wrappers = [module for module in plain.modules() if isinstance(module, lora.ParamWrapper)]
    assert wrappers and not any(isinstance(module, ParamWrapper) for module in wrappers)
    forest = Forest([support.random_sequence(16, seed=2), support.random_sequence(5, seed=3)])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(plain, forest, cotangent)
    assert any("experts" in name for name in truth)
    engine = Engine(model)
    try:
        for plan in (
            Plan(),
            Plan(chunk_tokens=5, layers_per_segment=2),
            Plan(chunk_tokens=4, keep="attention", halves=True),
        ):
            engine.set_plan(plan)
            found = support.walk_gradients(engine, forest, cotangent)
            assert support.worst(found, truth) < 1e-5, plan
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
def test_every_way_to_compute_experts_gives_what_peft_gives(family, way, tmp_path):
    model = adapted(family, torch.float32, rank=5)
    save_adapter(model, tmp_path / "saved")
    plain = peft_again(family, tmp_path / "saved", torch.float32)
    for each in (model, plain):
        each.base_model.model.config.get_text_config()._experts_implementation = way
    truth = logits(plain)
    torch.testing.assert_close(logits(model), truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))
    with adapters_disabled(model):
        assert not torch.allclose(logits(model), truth, atol=1e-2)


def test_no_second_stack_is_formed():
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, out.numel())
            return out

    model = adapted("qwen3_moe", torch.float32, rank=2)
    stack = min(parameter.numel() for parameter in find_stacks(model).values())
    with Watch() as watch:
        model(input_ids=TOKENS[:, :4], use_cache=False, logits_to_keep=1).logits.sum().backward()
    assert 0 < watch.largest < stack


def test_small_updates_are_not_rounded_away_in_half_precision():
    torch.manual_seed(0)
    weight, left, right = torch.randn(2, 64, 32), torch.randn(2, 64, 4), torch.randn(2, 4, 32)
    x, small = torch.randn(5, 32), 1e-4
    truth = small * F.linear(x, (left @ right)[1])
    stack = Adapted(weight.bfloat16(), left.bfloat16(), right.bfloat16(), small)
    summed = (weight.bfloat16() + (small * left @ right).bfloat16()) - weight.bfloat16()
    low = F.linear(F.linear(x.bfloat16(), stack.right[1]), stack.left[1]) * small
    error = torch.linalg.norm(low - truth) / torch.linalg.norm(truth)
    assert error < 0.02 < torch.linalg.norm(F.linear(x, summed[1].float()) - truth) / torch.linalg.norm(truth)


@pytest.mark.parametrize(
    "ask",
    [
        lambda w, x: F.linear(x, w[1]),
        lambda w, x: F.linear(x, w[torch.tensor(2)], torch.ones(6)),
        lambda w, x: F.linear(x[None], w[-1]),
        lambda w, x: x @ w[0].transpose(0, 1),
        lambda w, x: torch.bmm(x.expand(3, -1, -1), w.transpose(1, 2)),
        lambda w, x: x @ w.transpose(-1, -2),
        lambda w, x: w @ x.T,
        lambda w, x: w[1] @ x.T,
        lambda w, x: torch.einsum("eoi,ti->eto", w, x),
        lambda w, x: w.sum(0),
        lambda w, x: w[torch.tensor([0, 2])].transpose(0, 1) * 2,
        lambda w, x: w.permute(2, 0, 1) + torch.cat([w, w]).mean(),
        lambda w, x: w.flatten(1).mT,
    ],
)
def test_whatever_is_asked_of_an_adapted_stack_is_asked_of_the_sum(ask):
    torch.manual_seed(0)
    weight = torch.randn(3, 6, 4, dtype=torch.float64)
    left, right = torch.randn(3, 6, 2, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(ask(Adapted(weight, left, right, 0.5), x), ask(weight + 0.5 * left @ right, x))
    finally:
        torch.set_default_dtype(default)


def test_files_split_as_they_were_joined():
    down, up = torch.randn(3, 2, 5), torch.randn(3, 4, 2)
    again = split(*joined(down, up), 3)
    assert torch.equal(again[0], down) and torch.equal(again[1], up)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("settings", [{}, {"layers": "last 1"}, {"targets": ["experts.down_proj"]}, {"rslora": True}])
def test_uneven_ranks_load_everywhere(family, settings, tmp_path):
    names = list(find_stacks(tiny(family)))
    kl = {name: float(number % 5 + 1) for number, name in enumerate(names)}
    model = adapted(family, rank_policy="by_kl", kl=kl, rank=4, **settings)
    save_adapter(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["rank_pattern"] and config["target_parameters"] == sorted(config["target_parameters"])
    truth = logits(model)
    torch.testing.assert_close(logits(peft_again(family, tmp_path / "saved")), truth)
    again = load_adapter(tiny(family), tmp_path / "saved")
    torch.testing.assert_close(logits(again.double()), truth)
    # Formed from the files by hand.
    base = tiny(family)
    updates = named_for(read_updates(tmp_path / "saved"), base)
    for name, weight in find_stacks(base).items():
        if name in updates:
            delta = updates[name].delta().double()
            weight.data += delta.mT if family == "gpt_oss" else delta
    for name, update in updates.items():
        if not update.stacked:
            base.get_submodule(name).weight.data += update.delta().double()
    torch.testing.assert_close(logits(base), truth, rtol=1e-5, atol=1e-5)


def test_a_warm_start_computes_what_the_older_adapter_computed(tmp_path):
    older = adapted("qwen3_moe", rank=3, alpha=9)
    save_adapter(older, tmp_path / "older")
    newer = adapted("qwen3_moe", rank=3, alpha=6)
    init_adapter(newer, tmp_path / "older")
    torch.testing.assert_close(logits(newer), logits(older))
    with pytest.raises(UserError, match=r"experts\.gate_up_proj\.lora_A: \[12, 32\] there, \[16, 32\] here"):
        init_adapter(adapted("qwen3_moe", rank=4), tmp_path / "older")
    with pytest.raises(UserError, match=r"experts\.down_proj\.lora_B: .* there, nothing here"):
        init_adapter(adapted("qwen3_moe", targets="all-linear"), tmp_path / "older")


def test_a_frozen_adapter_of_the_same_experts_is_a_reference(tmp_path):
    frozen = adapted("qwen3_moe")
    save_adapter(frozen, tmp_path / "frozen")
    model = add_lora(tiny("qwen3_moe"), rank=2, alpha=2, targets=["all-linear", "experts"])
    plain = fingerprint(tiny("qwen3_moe"))
    assert fingerprint(model) == plain
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    load_reference(model, tmp_path / "frozen")
    with reference_active(model):
        torch.testing.assert_close(logits(model), logits(frozen))
    torch.testing.assert_close(logits(model), logits(tiny("qwen3_moe")))
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trainable
    linears = add_lora(tiny("qwen3_moe"), rank=2, alpha=2)
    load_reference(linears, tmp_path / "frozen")
    with reference_active(linears):
        torch.testing.assert_close(logits(linears), logits(frozen))
    torch.testing.assert_close(logits(linears), logits(tiny("qwen3_moe")))
    assert not any(p.requires_grad for name, p in linears.named_parameters() if "experts" in name)
    others = add_lora(tiny("qwen3_moe"), rank=2, alpha=2, targets=["experts.down_proj"])
    with pytest.raises(UserError, match="experts"):
        load_reference(others, tmp_path / "frozen")


def test_what_does_not_fit_is_named(tmp_path):
    model = adapted("qwen3_moe")
    save_adapter(model, tmp_path / "saved")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\.gate_up_proj: A and B are \[12, 32\]"):
        load_adapter(tiny("qwen3_moe", num_experts=5), tmp_path / "saved")
    with pytest.raises(UserError, match=r"mlp\.experts.*the model has no such stack"):
        load_adapter(support.tiny_model("qwen3", torch.float64), tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "short")
    tensors = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    lost = next(name for name in tensors if "experts.base_layer.lora_B" in name)
    save_file({n: t for n, t in tensors.items() if n != lost}, tmp_path / "short" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts"):
        load_adapter(tiny("qwen3_moe"), tmp_path / "short")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\.base_layer: has no B"):
        read_updates(tmp_path / "short")


def test_dropout_is_refused():
    with pytest.raises(UserError, match=r"lora\.dropout: adapters of experts' tensors take none"):
        add_lora(tiny("mixtral"), rank=2, alpha=2, targets=["experts"], dropout=0.1)


def test_plain_peft_names_the_same_tensors(tmp_path):
    """An adapter that PEFT itself made and saved is read here."""
    settings = dict(target_modules=[], target_parameters=["experts.gate_up_proj", "mlp.experts.down_proj"])
    plain = stirred(
        get_peft_model(tiny("qwen3_moe"), LoraConfig(r=2, lora_alpha=6, **settings), autocast_adapter_dtype=False)
    )
    plain.save_pretrained(str(tmp_path / "theirs"))
    loaded = load_adapter(tiny("qwen3_moe"), tmp_path / "theirs")
    torch.testing.assert_close(logits(loaded.double()), logits(plain))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_ghost_takes_what_the_walk_takes(family):
    model = adapted(family, torch.float32).train()
    forest, plan = Forest([support.random_sequence(120)]), Plan(chunk_tokens=32)
    real = real_peak(model, plan, forest)
    # Experts get uneven shares, and are assumed to get even ones.
    assert ghost_peak(model, plan, forest) == pytest.approx(real, rel=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", ["all-linear", "experts"]])
def test_grouped_experts_can_be_planned_in_any_dtype(dtype, targets):
    model = tiny("qwen3_moe", dtype)
    model.config._experts_implementation = "grouped_mm"
    model = stirred(add_lora(model, rank=3, alpha=6, targets=targets)).train()
    forest, plan = Forest([support.random_sequence(120)]), Plan(chunk_tokens=32)
    real = real_peak(model, plan, forest)
    assert ghost_peak(model, plan, forest) == pytest.approx(real, rel=0.15)
