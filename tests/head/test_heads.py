"""Bounded heads against full logits, and the form that is read off a model's head."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longtune.engine import Engine, Plan
from longtune.head.form import HeadForm, read_form
from longtune.head.heads import Chunked, ModelHead, Reference, make_head
from longtune.model.stack import Stack
from tests import support

FORMS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 2.0},
}


def form(dtype, bias=False, scale=1.0, softcap=None) -> HeadForm:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(50, 12, generator=generator).to(dtype)
    return HeadForm(weight, torch.randn(50, generator=generator).to(dtype) if bias else None, scale, softcap)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("chunk", [1, 4, 7, None])
@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_chunked_head_equals_full_logits(settings, chunk):
    head_form = form(torch.float64, **settings)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    token = torch.randint(50, (7,), generator=generator)
    cotangent = torch.randn(7, generator=generator, dtype=torch.float64)
    cotangent[3] = 0
    truth_lp, truth_d, _ = Reference(head_form).backward(hidden, token, cotangent)
    head = Chunked(head_form, chunk)
    log_probs, dhidden, grads = head.backward(hidden, token, cotangent)
    assert grads == []
    assert torch.allclose(log_probs, truth_lp, atol=1e-12) and torch.allclose(dhidden, truth_d, atol=1e-12)
    assert torch.allclose(head.log_probs(hidden, token), truth_lp, atol=1e-12)


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_bf16_head_is_no_further_from_the_truth_than_autograd(settings):
    half = form(torch.bfloat16, **settings)
    full = HeadForm(half.weight.double(), None if half.bias is None else half.bias.double(), half.scale, half.softcap)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(64, 12, generator=generator).bfloat16()
    token = torch.randint(50, (64,), generator=generator)
    cotangent = torch.randn(64, generator=generator)
    truth = Reference(full).backward(hidden.double(), token, cotangent.double())
    plain = Reference(half).backward(hidden, token, cotangent)
    ours = Chunked(half, 16).backward(hidden, token, cotangent)
    for index in (0, 1):
        budget = torch.linalg.norm(plain[index].double() - truth[index])
        assert torch.linalg.norm(ours[index].double() - truth[index]) <= 1.05 * budget


@pytest.mark.parametrize(
    "family, settings, expected",
    [
        ("llama", {}, (1.0, None)),
        ("gemma2", {"final_logit_softcapping": 2.0}, (1.0, 2.0)),
        ("granite", {"logits_scaling": 4.0}, (0.25, None)),
        ("cohere", {"logit_scale": 0.5}, (0.5, None)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_form_is_read_off_the_model(family, settings, expected, dtype):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**support.BASE, "num_hidden_layers": 2, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).requires_grad_(False)
    found = read_form(Stack(model))
    assert found is not None
    assert (found.scale, found.softcap) == expected


def test_an_unknown_head_is_asked_through_the_model():
    """A head that no closed form describes, and one that is trained, go through the model's own forward."""
    model = support.clean_llama().requires_grad_(False)
    model.lm_head.register_forward_hook(lambda module, args, output: output.sin() * 3)
    stack = Stack(model)
    head = make_head(stack, 3)
    assert isinstance(head, ModelHead)
    hidden = torch.randn(7, 32, dtype=torch.float64)
    token = torch.randint(97, (7,))
    cotangent = torch.randn(7, dtype=torch.float64)
    leaf = hidden.clone().requires_grad_()
    lp = torch.log_softmax((leaf @ model.lm_head.weight.T).sin() * 3, -1).gather(1, token[:, None])[:, 0]
    (truth,) = torch.autograd.grad(lp, leaf, cotangent)
    found, dhidden, _ = head.backward(hidden, token, cotangent)
    assert torch.allclose(found, lp.detach(), atol=1e-10) and torch.allclose(dhidden, truth, atol=1e-10)


def test_the_engine_takes_the_chunked_head_for_a_frozen_linear():
    model = support.with_lora(support.tiny_model("gemma2"))
    engine = Engine(model, Plan(head_chunk=5))
    assert isinstance(engine.head, Chunked) and engine.head.chunk == 5
