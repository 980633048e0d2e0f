"""Linears whose values no gradient needs: found in the layer itself, left out in recomputed cells, the same gradients.

Oracle: plain autograd of the same model, which computes everything.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from longtune.engine import Engine, Plan
from longtune.engine.trace import Ghost
from longtune.model.adapters import add_lora
from longtune.model.lora import LeanLinear
from longtune.tree import Forest
from tests import support

TREE = Forest([support.pair_tree(19, (9, 6)), support.random_sequence(11)])


def adapted(model, seed=1, **settings):
    model = add_lora(model, rank=3, alpha=6, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def walked(model, forest, plan, **options):
    """Gradients of the engine for the cotangent of the weights, and the engine."""
    engine = Engine(model, plan, **options)
    try:
        cotangent = -forest.targets.weight.to(torch.float32)
        found = support.walk_gradients(engine, forest, cotangent)
        return found, engine.unread
    finally:
        engine.close()


DOWN, KV = ("mlp.down_proj",), ("self_attn.k_proj", "self_attn.v_proj")
EXPECTED = {
    "llama": (DOWN, (*KV, *DOWN)),
    "mistral": (DOWN, (*KV, *DOWN)),
    # The norm of the keys needs them.
    "qwen3": (DOWN, ("self_attn.v_proj", *DOWN)),
    # A norm behind the MLP needs its output.
    "gemma2": ((), KV),
    "gemma3_text": ((), ("self_attn.v_proj",)),
    # One linear for queries, keys and values.
    "phi3": (DOWN, DOWN),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_left_out_is_what_no_gradient_needs(name):
    model = adapted(support.tiny_model(name, torch.float32))
    with_values = Engine(model, Plan())
    fresh, stored = EXPECTED[name]
    for unread in with_values.unread:
        assert unread.fresh == fresh
        assert unread.stored == stored
    with_values.close()


@pytest.mark.parametrize("name", support.ARCHITECTURES)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(layers_per_segment=1),
        Plan(layers_per_segment=1, chunk_tokens=8, keep="attention", boundary_store="host"),
        Plan(layers_per_segment=2, chunk_tokens=5, keep="kv"),
    ],
    ids=lambda plan: f"{plan.chunk_tokens}-{plan.keep}",
)
def test_gradients_are_those_of_autograd(name, plan):
    model = adapted(support.tiny_model(name))
    truth = support.oracle_gradients(model, TREE, -TREE.targets.weight)
    found, _ = walked(model, TREE, plan)
    assert support.worst(found, truth) < 1e-5


def test_the_left_out_products_are_not_computed(monkeypatch):
    """With them a cell's graph would take as many products as the layer's forward."""
    model = adapted(support.tiny_model("llama", torch.float32))
    seen: list[str] = []
    forward = LeanLinear.forward

    def counted(self, x, *args, **kwargs):
        out = forward(self, x, *args, **kwargs)
        if torch.is_grad_enabled():
            seen.append("placeholder" if out.untyped_storage().nbytes() == out.element_size() else "values")
        return out

    plan = Plan(layers_per_segment=1, chunk_tokens=16, keep="attention")
    engine = Engine(model, plan)
    assert engine.unread
    monkeypatch.setattr(LeanLinear, "forward", counted)
    walk = engine.walk(TREE, (0, 0), True)
    walk.forward()
    walk.head(-TREE.targets.weight)
    walk.backward()
    engine.close()
    chunks, layers = 3, 4
    assert seen.count("placeholder") == layers * ((chunks - 1) * 3 + 1)
    assert seen.count("values") == layers * chunks * 7 - seen.count("placeholder")


def test_dropout_computes_everything_and_is_right():
    """With dropout the plain product runs; gradients of a repeated walk are the same to the bit."""
    model = adapted(support.tiny_model("llama", torch.float32), dropout=0.3).train()
    one, _ = walked(model, TREE, Plan(layers_per_segment=1, chunk_tokens=7))
    other, _ = walked(model, TREE, Plan(layers_per_segment=1, chunk_tokens=7, keep="everything"))
    assert support.worst(one, other) < 1e-5


class _Peeking(torch.nn.Module):
    """A layer that looks at its MLP's output in a way that only shows in values."""

    def __init__(self, mlp, kind):
        super().__init__()
        self.mlp, self.kind = mlp, kind

    def forward(self, x):
        y = self.mlp(x)
        if self.kind == "clamp":
            return y.clamp(-0.01, 0.01)
        if self.kind == "python":
            return y * (2.0 if float(y.detach().sum()) > 0 else 0.5)
        if self.kind == "product":
            return y * y.mean(-1, keepdim=True)
        return _hidden_kernel(y, x)


class _HiddenScale(torch.autograd.Function):
    """Stands for a kernel outside torch's operations: it reads values that nobody sees it read."""

    @staticmethod
    def forward(ctx, y, x):
        ctx.factor = y.detach().numpy().copy()
        return torch.from_numpy(y.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, dout):
        return dout * 2 * torch.from_numpy(ctx.factor), None


def _hidden_kernel(y, x):
    return _HiddenScale.apply(y, x)


@pytest.mark.parametrize("kind", ["clamp", "python", "product", "hidden kernel"])
def test_a_value_that_is_read_is_computed(kind):
    model = adapted(support.tiny_model("llama", torch.float32))
    for layer in model.base_model.model.model.layers:
        layer.mlp = _Peeking(layer.mlp, kind)
    forest = Forest([support.random_sequence(14)])
    truth = support.oracle_gradients(model, forest, -forest.targets.weight)
    found, unread = walked(model, forest, Plan(layers_per_segment=1))
    assert all("down_proj" not in " ".join(u.fresh + u.stored) for u in unread)
    assert support.worst(found, truth) < 1e-4


@pytest.mark.parametrize(
    ("plan", "learns"),
    [
        (Plan(keep="everything"), False),
        (Plan(keep="everything", keep_layers=4), False),
        (Plan(keep="everything", keep_layers=3), True),
        (Plan(), True),
    ],
)
def test_nothing_is_learnt_where_nothing_is_recomputed(monkeypatch, plan, learns):
    """Neither on a step nor on a watched one, which is told by the real engine."""
    learnt: list[Engine] = []
    learn = Engine._learn_unread

    def counted(self):
        learnt.append(self)
        return learn(self)

    monkeypatch.setattr(Engine, "_learn_unread", counted)
    model = adapted(support.tiny_model("llama", torch.float32))
    engine = Engine(model, plan)
    ghost = Ghost(model, "cpu-flash", "cpu", engine)
    ghost.trace(plan, TREE)
    assert learnt == [engine] * learns
    support.walk_gradients(engine, TREE, -TREE.targets.weight)
    assert learnt == [engine] * learns
    engine.log_probs(TREE)
    assert learnt == [engine] * learns
    ghost.close()
    engine.close()


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_model_is_freed_after_what_nobody_reads_is_learnt(name):
    """No graph of the cells that were looked at stays, and so none of the weights they used."""
    model = adapted(support.tiny_model(name, torch.float32))
    engine = Engine(model, Plan())
    assert engine.unread
    engine.close()
    weights = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    del model, engine
    gc.collect()
    assert not any(ref() is not None for ref in weights)
