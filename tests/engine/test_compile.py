"""Layers through `torch.compile`: the same gradients, rows of all sizes, and what happens where it fails.

Oracle: plain autograd of the same model.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

from longtune.engine import Engine, Plan
from longtune.engine.proof import disproof
from longtune.errors import UserError
from longtune.objective import get
from longtune.tree import Forest
from tests import support
from tests.engine.test_unread import adapted

# torch's compiler warns itself: of deprecated parts of its own, and of gradients that it looks at on the side.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SFT = get("sft")


def step(engine, forest):
    engine.accumulate(forest, SFT, {"weight": 1.0})
    found = support.gradients(engine.model)
    engine.model.zero_grad()
    return found


def row(tokens, seed=0):
    return Forest([support.random_sequence(tokens, seed=seed)])


def small(dtype=torch.float32):
    return adapted(support.tiny_model("llama", dtype, num_hidden_layers=1))


def compiled_graphs(monkeypatch):
    """Counts the graphs that the compiler is given."""
    from torch._dynamo import backends

    seen = []
    eager = backends.debugging.aot_eager

    def counting(graph, inputs, **options):
        seen.append(graph)
        return eager(graph, inputs, **options)

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile(model, backend=counting, **options))
    return seen


def test_chunks_of_one_size_and_rows_of_any():
    """Through the real compiler, with left out linears, an odd last chunk, and rows of one chunk."""
    torch._dynamo.reset()
    model = small()
    engine = Engine(model, Plan(chunk_tokens=8, keep="attention"), compile=True)
    forest = row(19)
    truth = support.oracle_gradients(model, forest, -forest.targets.weight)
    assert support.worst(step(engine, forest), truth) < 1e-4
    engine.close()


def test_rows_of_one_chunk_are_compiled_once_for_all_sizes(monkeypatch):
    torch._dynamo.reset()
    seen = compiled_graphs(monkeypatch)
    model = small()
    engine = Engine(model, Plan(keep="everything"), compile=True)
    for number, tokens in enumerate((17, 29, 12)):
        forest = row(tokens, seed=number)
        truth = support.oracle_gradients(model, forest, -forest.targets.weight)
        assert support.worst(step(engine, forest), truth) < 1e-4
        if number == 0:
            known = len(seen)
    assert 0 < known == len(seen)
    engine.close()


def test_dropout_is_not_compiled(monkeypatch):
    torch._dynamo.reset()
    seen = compiled_graphs(monkeypatch)
    model = adapted(support.tiny_model("llama", torch.float32, num_hidden_layers=2), dropout=0.2).train()
    engine = Engine(model, Plan(keep="everything"), compile=True)
    step(engine, row(14))
    assert not seen
    engine.close()


@pytest.mark.parametrize("plan", [Plan(), Plan(chunk_tokens=7, keep="attention", boundary_store="host")], ids=str)
def test_where_nothing_can_be_compiled_the_walk_goes_on_without(monkeypatch, plan):
    """A compiler that fails at its second graph, in the middle of a layer: the step is whole, and told of once."""
    torch._dynamo.reset()
    calls = []

    def failing(graph, inputs, **options):
        calls.append(graph)
        if len(calls) > 1:
            raise RuntimeError("no C compiler\nsecond line")
        return graph

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile(model, backend=failing, **options))
    model = small()
    forest = row(21)
    truth = support.oracle_gradients(model, forest, -forest.targets.weight)
    told: list[str] = []
    engine = Engine(model, plan, compile=True, on_compile_failure=told.append)
    for _ in range(2):
        assert support.worst(step(engine, forest), truth) < 1e-5
    assert len(told) == 1 and "no C compiler" in told[0] and "second line" not in told[0]
    assert not engine.compile
    engine.close()
    calls.clear()
    strict = Engine(model, plan, compile=True)
    with pytest.raises(UserError, match="can't be compiled here"):
        step(strict, forest)
    strict.close()


def losing(wrong):
    """In place of torch.compile: a layer that computes its output and loses what `wrong` takes from the gradients."""

    def compile(layer, **options):
        def run(hidden, *args, **kwargs):
            return wrong(layer, hidden, args, kwargs)

        return run

    return compile


def below(layer, hidden, args, kwargs):
    """What reaches the layers below is nothing at all, or zeros."""
    return layer(hidden.detach().requires_grad_(), *args, **kwargs)


def zeros(layer, hidden, args, kwargs):
    return layer(hidden.detach() + 0 * hidden, *args, **kwargs)


def scaled(layer, hidden, args, kwargs):
    out = layer(hidden, *args, **kwargs)
    first = out[0] if isinstance(out, tuple) else out
    return 2 * first - first.detach()


def none(layer, hidden, args, kwargs):
    out = layer(hidden, *args, **kwargs)
    return (out[0] if isinstance(out, tuple) else out).detach()


def not_a_number(layer, hidden, args, kwargs):
    out = layer(hidden, *args, **kwargs)
    first = out[0] if isinstance(out, tuple) else out
    first.register_hook(lambda g: g * math.nan) if first.requires_grad else None
    return first


PLANS = [Plan(), Plan(chunk_tokens=7, keep="attention"), Plan(keep="everything")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("wrong", [below, zeros, scaled, none, not_a_number])
def test_a_compiler_that_loses_gradients_is_found_out_before_a_step(monkeypatch, wrong, plan, dtype):
    model = adapted(support.tiny_model("llama", dtype, num_hidden_layers=2))
    forest = row(21)
    plain = Engine(model, plan)
    truth = step(plain, forest)
    plain.close()
    monkeypatch.setattr(torch, "compile", losing(wrong))
    told: list[str] = []
    phases: list[str] = []
    engine = Engine(
        model, plan, compile=True, on_compile_failure=told.append, on_phase=lambda phase, layer: phases.append(phase)
    )
    for _ in range(2):
        found = step(engine, forest)
        assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert len(told) == 1 and re.search(r"other gradients \(of .*lora|fail where plain ones don't", told[0])
    assert not engine.compile and phases.count("done") == 2
    engine.close()
    strict = Engine(model, plan, compile=True)
    with pytest.raises(UserError, match=r"compiled layers (give other gradients|fail where plain)") as raised:
        step(strict, forest)
    assert raised.value.problems[0].fix == "set compile: false"
    strict.close()


def test_each_kind_of_row_is_tried_once(monkeypatch):
    """A layer that is compiled as it is: tried for chunks of a size, for another size, and for rows of any size."""
    monkeypatch.setattr(torch, "compile", lambda layer, **options: layer)
    model = adapted(support.tiny_model("llama", torch.bfloat16, num_hidden_layers=2))
    tried = []

    def watching(engine, forest, kind):
        tried.append(kind)
        return disproof(engine, forest, kind)

    monkeypatch.setattr("longtune.engine.engine.disproof", watching)
    engine = Engine(model, Plan(chunk_tokens=8), compile=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    before = torch.get_rng_state()
    assert disproof(engine, row(20), ("size", 8)) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.requires_grad)
    model.zero_grad()
    for tokens in (20, 8, 31, 5, 3):
        step(engine, row(tokens))
    engine.set_plan(Plan(chunk_tokens=6))
    step(engine, row(20))
    step(engine, row(20))
    assert tried == [("size", 8), ("any size", None), ("size", 6)]
    engine.close()
