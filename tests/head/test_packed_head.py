"""A packed head through the bounded heads: the same numbers, a slice of the vocabulary at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longtune.head import matrix as room
from longtune.head.form import read_form
from longtune.head.heads import Chunked, Reference, make_head
from longtune.model.packed import PackedEmbedding, PackedLinear, TiedHead
from longtune.model.packed.quantiser import quantise
from longtune.model.stack import Stack
from tests.model.packed.support import Format
from tests.support import tiny_model


def with_packed_head(name: str, tied: bool, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor]:
    """A tiny model whose head is packed, and the head's numbers."""
    model = tiny_model(name, dtype)
    format = Format("affine", 5, 16)
    made = quantise(model.lm_head.weight.float(), format)
    tensors = (format, 32, made.weight, made.scales, made.biases)
    if tied:
        embedding = PackedEmbedding(*tensors, compute_dtype=dtype)
        if hasattr(model.model.embed_tokens, "scalar_embed_scale"):
            embedding.scale = torch.tensor(model.model.embed_tokens.scalar_embed_scale)
        model.model.embed_tokens, model.lm_head = embedding, TiedHead(embedding)
    else:
        model.lm_head = PackedLinear(*tensors, compute_dtype=dtype, bias=torch.randn(97).to(dtype))
    return model.requires_grad_(False), model.lm_head.dequantise(dtype)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_packed_head_is_its_dequantised_copy(name, tied, chunk, monkeypatch):
    model, weight = with_packed_head(name, tied)
    monkeypatch.setattr(room, "SLICE_BYTES", 1)
    stack = Stack(model)
    head = make_head(stack, chunk)
    assert isinstance(head, Chunked)
    form = read_form(stack, packed=True)
    assert form is not None and (form.softcap is None) == (name == "llama")
    dense = Reference(type(form)(weight, form.bias, form.scale, form.softcap))
    hidden = torch.randn(11, 32, dtype=torch.float64)
    token, cotangent = torch.randint(97, (11,)), torch.randn(11, dtype=torch.float64)
    assert torch.allclose(head.log_probs(hidden, token), dense.log_probs(hidden, token), rtol=1e-12)
    ours, theirs = head.backward(hidden, token, cotangent), dense.backward(hidden, token, cotangent)
    assert torch.allclose(ours[0], theirs[0], rtol=1e-12)
    assert torch.allclose(ours[1], theirs[1], rtol=1e-10, atol=1e-14)


def test_slices_bound_what_is_dequantised(monkeypatch):
    sizes = []
    real = PackedLinear.dequantise
    monkeypatch.setattr(PackedLinear, "dequantise", lambda *args: (sizes.append(x := real(*args)), x)[1])
    format = Format("affine", 4, 32)
    made = quantise(torch.randn(700, 32), format)
    big = PackedLinear(format, 32, made.weight, made.scales, made.biases, compute_dtype=torch.float32)
    monkeypatch.setattr(room, "SLICE_BYTES", 256 * 32 * 4)
    matrix = room.PackedMatrix(big)
    scores = torch.empty(3, 700)
    hidden = torch.randn(3, 32)
    matrix.scores_into(scores, hidden)
    assert [tuple(x.shape) for x in sizes] == [(256, 32), (256, 32), (188, 32)]
    assert torch.allclose(scores, hidden @ real(big).T, atol=1e-5)
