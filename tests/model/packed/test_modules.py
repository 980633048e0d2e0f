"""Packed modules: forward, gradients, moving and casting, experts, and the cache of an open layer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from longtune.model.packed import Format, PackedEmbedding, PackedExperts, PackedWeight, TiedHead, layer_open, open_bytes
from longtune.model.packed import modules as packed_modules
from longtune.model.packed.quantiser import quantise
from tests.model.packed.support import packed_linear


@pytest.fixture
def counted(monkeypatch):
    """How often rows were dequantised."""
    calls = []
    real = packed_modules.dequantise_rows
    monkeypatch.setattr(packed_modules, "dequantise_rows", lambda *args: (calls.append(1), real(*args))[1])
    return calls


@pytest.mark.parametrize("shape", [(7, 64), (1, 64), (2, 3, 64), (0, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_computes_with_its_numbers(shape, bias):
    linear = packed_linear(5, 64, bias=bias)
    x = torch.randn(shape)
    assert torch.equal(linear(x), F.linear(x, linear.dequantise(), linear.bias))


def test_gradients_are_those_of_the_dequantised_copy_in_fp64():
    linear = packed_linear(5, 64, bias=True).requires_grad_(True)
    x = torch.randn(3, 4, 64, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(3, 4, 5, dtype=torch.float64)
    ours = torch.autograd.grad(linear(x), [x, linear.bias], cotangent)
    weight, bias = linear.dequantise(torch.float64), linear.bias.detach().double().requires_grad_()
    theirs = torch.autograd.grad(F.linear(x, weight, bias), [x, bias], cotangent)
    assert torch.equal(ours[0], theirs[0])
    assert torch.allclose(ours[1].double(), theirs[1], rtol=1e-6)


def test_no_dequantised_copy_survives_the_call(monkeypatch):
    made: list[weakref.ref] = []
    real = PackedWeight.dequantise

    def watched(self, *args, **kwargs):
        numbers = real(self, *args, **kwargs)
        made.append(weakref.ref(numbers))
        return numbers

    monkeypatch.setattr(PackedWeight, "dequantise", watched)
    x = torch.randn(3, 64, requires_grad=True)
    y = packed_linear(5, 64)(x)
    gc.collect()
    assert made and not [ref for ref in made if ref() is not None]
    y.sum().backward()
    gc.collect()
    assert len(made) == 2 and not [ref for ref in made if ref() is not None]


def test_autocast_decides_the_dtype():
    linear = packed_linear(5, 64)
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_casting_a_model_leaves_what_is_stored():
    linear = packed_linear(5, 64, bias=True)
    before = linear.dequantise(torch.float32)
    for cast in (torch.float64, torch.float16, torch.bfloat16):
        linear.to(cast)
        assert linear.compute_dtype == cast and linear.scales.dtype == torch.float32
        assert linear.bias.dtype == cast
        assert torch.equal(linear.dequantise(torch.float32), before)
    assert nn.Sequential(linear).to("meta")[0].weight.is_meta


def test_copies_and_pickles_are_whole():
    linear = packed_linear(5, 64)
    with layer_open(linear):
        linear(torch.randn(1, 64))
        for made in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
            assert torch.equal(made.dequantise(), linear.dequantise()) and made._open is None


def test_an_embedding_dequantises_the_rows_that_are_asked_for(monkeypatch):
    weight = torch.randn(50, 32)
    made = quantise(weight, Format("affine", 4, 32))
    embedding = PackedEmbedding(
        Format("affine", 4, 32), 32, made.weight, made.scales, made.biases, compute_dtype=torch.bfloat16
    )
    whole = embedding.dequantise()
    seen = []
    real = packed_modules.dequantise_rows
    monkeypatch.setattr(packed_modules, "dequantise_rows", lambda *a: (seen.append(a[-1].shape), real(*a))[1])
    token = torch.tensor([[3, 49], [0, 3]])
    assert torch.equal(embedding(token), whole[token])
    assert seen == [(4, 32)]
    assert embedding(torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0, 32)


def test_a_tied_head_follows_its_embedding():
    linear = packed_linear(50, 32)
    embedding = PackedEmbedding(
        linear.format, 32, linear.weight, linear.scales, linear.biases, compute_dtype=torch.float32
    )
    model = nn.ModuleDict({"embedding": embedding, "head": TiedHead(embedding)})
    x = torch.randn(3, 32)
    assert torch.equal(model["head"](x), linear(x))
    made = copy.deepcopy(model)
    assert made["head"].source is made["embedding"]
    assert not [name for name in model.state_dict() if name.startswith("head")]


def experts(interleaved: bool = False, transposed: bool = False, parts: int = 2) -> PackedExperts:
    made = []
    for seed in range(parts):
        weight = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(seed))
        one = quantise(weight, Format("affine", 4, 32))
        made.append(
            PackedWeight(Format("affine", 4, 32), 32, one.weight, one.scales, one.biases, compute_dtype=torch.float32)
        )
    return PackedExperts(made, interleaved=interleaved, transposed=transposed)


@pytest.mark.parametrize("interleaved", [False, True])
def test_an_expert_stands_for_its_matrix_in_a_linear(interleaved):
    stack = experts(interleaved)
    gate, up = (part.dequantise() for part in stack.parts)
    order = torch.stack([gate, up], 2).flatten(1, 2) if interleaved else torch.cat([gate, up], 1)
    assert stack.shape == (3, 12, 32) and torch.equal(stack.dequantise(), order)
    x = torch.randn(5, 32, dtype=torch.float64, requires_grad=True)
    y = F.linear(x, stack[torch.tensor(1)])
    assert torch.equal(y, F.linear(x, order[1].double()))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(dx, order[1].double().sum(0).expand_as(dx))
    with layer_open(stack):
        assert torch.equal(F.linear(x, stack[1]), y)


def test_transposed_experts_stand_right_of_a_product():
    stack = experts(transposed=True)
    x = torch.randn(5, 32)
    assert stack.shape == (3, 32, 12)
    assert torch.equal(x @ stack[2], F.linear(x, stack.dequantise()[2]))


def test_experts_refuse_what_they_can_not_stand_for():
    with pytest.raises(NotImplementedError):
        F.linear(torch.randn(5, 32), experts(transposed=True)[0])
    with pytest.raises(NotImplementedError):
        torch.add(torch.randn(5, 32), experts()[0])
    with pytest.raises(TypeError, match="experts_implementation"):
        experts()[torch.tensor([0, 1])]


def test_an_open_layer_is_dequantised_once(counted):
    layer = nn.Sequential(packed_linear(64, 64), packed_linear(32, 64, seed=1))
    chunks = [torch.randn(3, 64, requires_grad=True) for _ in range(4)]
    closed = [torch.autograd.grad(layer(x).sum(), x)[0] for x in chunks]
    assert len(counted) == 4 * 2 * 2
    counted.clear()
    with layer_open(layer) as size:
        opened = [torch.autograd.grad(layer(x).sum(), x)[0] for x in chunks]
    assert len(counted) == 2
    assert size == open_bytes(layer) == 4 * (64 * 64 + 32 * 64)
    assert all(torch.equal(x, y) for x, y in zip(closed, opened, strict=True))
    assert all(module._open is None for module in layer)


def test_a_layer_opens_as_far_as_its_bytes_go(counted):
    layer = nn.Sequential(packed_linear(64, 64), packed_linear(64, 64, seed=1))
    with layer_open(layer, limit=4 * 64 * 64) as size:
        for _ in range(3):
            layer(torch.randn(1, 64))
    assert size == 4 * 64 * 64 and len(counted) == 1 + 3


def test_a_layer_is_closed_after_an_error():
    layer = nn.Sequential(packed_linear(64, 64))
    with pytest.raises(ZeroDivisionError), layer_open(layer):
        layer(torch.randn(1, 64))
        raise ZeroDivisionError
    assert layer[0]._open is None


def test_opening_twice_keeps_the_outer_one(counted):
    layer = nn.Sequential(packed_linear(64, 64))
    with layer_open(layer):
        layer(torch.randn(1, 64))
        with layer_open(layer) as inner:
            layer(torch.randn(1, 64))
        layer(torch.randn(1, 64))
    assert inner == 0 and len(counted) == 1


def test_a_layer_without_packed_weights_is_opened_for_nothing():
    with layer_open(nn.Linear(2, 2)) as size:
        assert size == 0


def test_a_compiled_layer_computes_the_same(counted):
    layer = nn.Sequential(packed_linear(64, 64), nn.SiLU(), packed_linear(32, 64, seed=1))
    compiled = torch.compile(layer, backend="aot_eager", dynamic=False)
    x = torch.randn(3, 64, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    counted.clear()
    with layer_open(layer):
        for _ in range(3):
            (found,) = torch.autograd.grad(compiled(x).sum(), x)
            assert torch.equal(found, wanted)
    assert len(counted) == 2
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(found, wanted) and len(counted) == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight": torch.zeros(5, 9, dtype=torch.int32)}, r"weight is \[5, 9\]"),
        ({"weight": torch.zeros(5, 8)}, "not packed in uint32"),
        ({"scales": torch.zeros(5, 3)}, r"scales are \[5, 3\], not \[5, 2\]"),
        ({"scales": torch.zeros(5, 2, dtype=torch.uint8)}, "not floating"),
        ({"biases": None}, "biases are missing"),
        ({"biases": torch.zeros(5, 1)}, r"biases are \[5, 1\], not \[5, 2\]"),
        ({"global_scale": torch.ones(1)}, "has no global_scale"),
        ({"columns": 96}, r"\[\.\.\., 12\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, reason):
    good = {
        "format": Format("affine", 4, 32),
        "columns": 64,
        "weight": torch.zeros(5, 8, dtype=torch.int32),
        "scales": torch.zeros(5, 2),
        "biases": torch.zeros(5, 2),
        "global_scale": None,
    }
    with pytest.raises(ValueError, match=reason):
        PackedWeight(**{**good, **change}, compute_dtype=torch.float32)
