"""Every adapter gradient equals plain autograd on the unmodified model, for every architecture and plan (fp64)."""

from __future__ import annotations

import itertools

import pytest
import torch

import longtune
from longtune.engine import Engine, Plan
from longtune.tree import Forest
from tests import support

MODELS = ["clean_llama", *support.ARCHITECTURES]
STORES = itertools.cycle(("device", "host", "disk"))
PLANS = (
    [
        Plan(chunk_tokens=chunk, layers_per_segment=layers, boundary_store=store)
        for chunk, layers, store in itertools.product((1, 5, None), (1, 2, None), ("device", "host"))
    ]
    + [
        Plan(chunk_tokens=chunk, layers_per_segment=layers, keep=keep, keep_layers=last, boundary_store=next(STORES))
        for chunk, layers, keep, last in itertools.product(
            (4, None), (1, 2), ("kv", "attention", "everything"), (None, 1, 2)
        )
    ]
    + [
        Plan(chunk_tokens=chunk, layers_per_segment=layers, keep="everything", keep_layers=2, keep_below=below)
        for chunk, layers, below in itertools.product((4, None), (1, 2), ("kv", "attention"))
    ]
    + [
        Plan(chunk_tokens=chunk, layers_per_segment=2, keep=keep, boundary_store=next(STORES), halves=True)
        for chunk, keep in itertools.product((4, None), ("nothing", "attention"))
    ]
)


def build(name: str) -> tuple[torch.nn.Module, float]:
    """The model and the relative difference that its own fp32 upcasts leave."""
    if name == "clean_llama":
        return support.with_lora(support.clean_llama()), 1e-9
    return support.with_lora(support.tiny_model(name)), 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_engine_gradients_equal_autograd_under_every_plan(name):
    model, tolerance = build(name)
    forest = Forest([support.random_sequence(16, seed=2), support.random_sequence(5, seed=3)])
    cotangent = -forest.targets.weight.double()
    truth_lp = support.oracle_log_probs(model, forest).detach()
    truth = support.oracle_gradients(model, forest, cotangent)
    engine = Engine(model)
    assert engine.unchunkable is None
    for plan in PLANS:
        engine.set_plan(plan)
        walk = engine.walk(forest, (0, 0), grad=True)
        walk.forward()
        log_probs = walk.head(cotangent)
        walk.backward()
        walk.sums.deliver()
        found = support.gradients(model)
        model.zero_grad()
        assert support.worst(found, truth) < tolerance, plan
        assert torch.allclose(log_probs, truth_lp, atol=tolerance), plan
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_token_tree_equals_separate_sequences(name):
    model, tolerance = build(name)
    forest = Forest([support.pair_tree(17, (9, 4)), support.pair_tree(3, (1, 2, 14, 5), seed=1)])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(model, forest, cotangent)
    engine = Engine(model)
    for chunk in (1, 5, None):
        engine.set_plan(Plan(chunk_tokens=chunk))
        found = support.walk_gradients(engine, forest, cotangent)
        assert support.worst(found, truth) < tolerance, chunk
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_streamed_model_equals_plain_model(name):
    model, tolerance = build(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (2, 21), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    plain = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    # transformers' own loss upcasts the logits to fp32; the truth is taken from its logits in fp64.
    truth_loss = torch.nn.functional.cross_entropy(plain.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    truth_loss.backward()
    truth, truth_logits = support.gradients(model), plain.logits.detach()
    model.zero_grad()
    for plan in (Plan(chunk_tokens=6), Plan(layers_per_segment=None), Plan(chunk_tokens=8, keep="everything")):
        with longtune.stream(model, plan=plan):
            output = model(input_ids=ids, attention_mask=mask, labels=labels)
            assert output.logits is None
            (output.loss / 2).backward()
            (model(input_ids=ids, attention_mask=mask, labels=labels).loss / 2).backward()
            found = support.gradients(model)
            model.zero_grad()
            assert abs(float(output.loss.detach() / truth_loss.detach()) - 1) < tolerance
            assert abs(float(output.loss.detach() / plain.loss.detach()) - 1) < 1e-6
            assert support.worst(found, truth) < tolerance, plan
            logits = model(input_ids=ids, attention_mask=mask).logits
            assert torch.allclose(logits[mask.bool()], truth_logits[mask.bool()], atol=1e-4)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss.backward()
            assert support.worst(support.gradients(model), truth) < tolerance, plan
            model.zero_grad()
    again = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    assert again.logits is not None and torch.equal(again.loss, plain.loss)


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("keep", ["nothing", "attention", "everything"])
def test_streamed_forwards_may_be_walked_back_in_any_order(store, keep):
    """Two losses of one model added up, with a forward in between that no backward follows, under other adapters."""
    model = support.with_lora(support.clean_llama())
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 97, (1, n), generator=generator) for n in (21, 13)]

    def loss():
        hidden = [model.get_base_model().model(input_ids=ids).last_hidden_state for ids in rows]
        with torch.no_grad(), model.disable_adapter():
            still = model.get_base_model().model(input_ids=rows[0]).last_hidden_state
        return hidden[0].pow(2).sum() + hidden[1].sin().sum() + (hidden[0] * still).sum()

    plain = loss()
    plain.backward()
    truth = support.gradients(model)
    model.zero_grad()
    with longtune.stream(model, plan=Plan(chunk_tokens=6, boundary_store=store, keep=keep)):
        streamed = loss()
        streamed.backward()
    assert abs(float(streamed.detach() / plain.detach()) - 1) < 1e-9
    assert support.worst(support.gradients(model), truth) < 1e-9
