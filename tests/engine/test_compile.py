"""Layers through `torch.compile`: the same gradients, rows of all sizes, and what happens where it fails.

Oracle: plain autograd of the same model.
"""

from __future__ import annotations

import pytest
import torch

from longtune.engine import Engine, Plan
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
