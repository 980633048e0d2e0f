"""Attention on token-tree paths against an explicit mask, whatever the chunks; uninitialised memory is poisoned."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longtune.attention import path
from longtune.attention.kernels import CpuFlash, Reference
from longtune.attention.path import PathAttention, Score
from longtune.attention.store import KVStore
from longtune.tree import Forest, Node, Targets, Tree
from tests import support

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6


def forest() -> Forest:
    chain = Tree(
        (Node(torch.arange(5)), Node(torch.arange(4), 0), Node(torch.arange(3), 1), Node(torch.arange(6), 0)),
        Targets.of([0], [1]),
    )
    return Forest([support.pair_tree(7, (3, 9)), support.random_sequence(4), chain, support.random_sequence(1)])


def allowed(forest: Forest, window: int | None) -> torch.Tensor:
    """Boolean [T, T] from the paths."""
    mask = torch.zeros(forest.size, forest.size, dtype=torch.bool)
    for span in forest.chunks(None)[0].spans:
        past = [c for start, end in span.past for c in range(start, end)]
        for at in range(span.start, span.end):
            seen = past + list(range(span.start, at + 1))
            mask[at, seen[-window:] if window else seen] = True
    return mask


def explicit(q, k, v, mask, score: Score):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * score.scale
    if score.softcap:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if score.sinks is not None:
        sinks = score.sinks.to(scores)[None, :, None, None].expand(1, -1, scores.shape[2], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1] @ v
    return torch.softmax(scores, -1) @ v


def check(attention, score, chunk_tokens, *, dtype=torch.float64, tolerance=1e-12, device="cpu", row=None, shape=None):
    """Forward, dQ, and dK and dV as they are when each chunk is reached from behind, against the explicit mask.

    Args:
        shape: query heads, key heads, key width, value width.
    """
    row = row or forest()
    if score.sinks is not None:
        score = replace(score, sinks=score.sinks.to(device))
    heads, key_heads, width, value_width = shape or (HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH)
    generator = torch.Generator().manual_seed(0)

    def make(heads: int, width: int) -> torch.Tensor:
        x = torch.randn(1, heads, row.size, width, generator=generator, dtype=torch.float64)
        return x.to(dtype).to(device)

    def close(ours: torch.Tensor, truth: torch.Tensor) -> bool:
        return float(torch.linalg.norm(ours.double() - truth)) <= tolerance * float(
            torch.linalg.norm(truth).clamp(min=1)
        )

    q, k, v = make(heads, width), make(key_heads, width), make(key_heads, value_width)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    truth = explicit(*leaves, allowed(row, score.window).to(device), score)
    dout = make(heads, value_width)
    dq_truth, dk_truth, dv_truth = torch.autograd.grad(truth, leaves, dout.double())

    store = KVStore(row.size)
    chunks = row.chunks(chunk_tokens)
    kept = []
    with torch.no_grad():
        for chunk in chunks:
            own = slice(chunk.start, chunk.end)
            store.write(chunk, k[:, :, own], v[:, :, own])
            kept.append(attention.forward(q[:, :, own], store, chunk, score))
        assert close(torch.cat([o for o, _ in kept], 2), truth.detach())
        dq = []
        for chunk, (o, lse) in reversed(list(zip(chunks, kept, strict=True))):
            own = slice(chunk.start, chunk.end)
            dq.append(attention.backward(dout[:, :, own], q[:, :, own], o, lse, store, chunk, score))
            # Complete when the chunk is reached from behind: every later reader has added its share.
            dk, dv = store.gradients(chunk)
            assert close(dk, dk_truth[:, :, own])
            assert close(dv, dv_truth[:, :, own])
    assert close(torch.cat(dq[::-1], 2), dq_truth)


SCORES = {
    "plain": Score(0.3),
    "window 1": Score(0.3, window=1),
    "window 5": Score(0.3, window=5),
    "window longer than the row": Score(0.3, window=1000),
    "softcap": Score(0.3, softcap=0.8),
    "sinks": Score(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "window and sinks": Score(0.3, window=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "window and softcap": Score(0.3, window=4, softcap=0.8),
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("kernel", [Reference(), Reference(score_bytes=1), CpuFlash()], ids=["whole", "rows", "flash"])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 3, 8])
def test_paths_equal_an_explicit_mask(kernel, score, chunk_tokens, monkeypatch):
    monkeypatch.setattr(path, "WINDOW_BLOCK", 2)
    check(PathAttention(kernel, Reference(), block_keys=4), score, chunk_tokens)


def test_no_score_matrix_grows_with_the_window_cut_row(monkeypatch):
    """Under a window each block sees at most window + block keys, wherever it lies."""
    seen: list[int] = []

    class Watching(Reference):
        def forward(self, q, k, v, **options):
            seen.append(k.shape[2])
            return super().forward(q, k, v, **options)

    monkeypatch.setattr(path, "WINDOW_BLOCK", 16)
    row = Forest([support.random_sequence(400)])
    store = KVStore(row.size)
    x = torch.randn(1, 1, row.size, 4)
    chunk = row.chunks(None)[0]
    store.write(chunk, x, x)
    PathAttention(Watching(), Reference()).forward(x, store, chunk, Score(0.5, window=30))
    assert max(seen) <= 30 + 16


def test_accumulators_are_wider_than_the_keys():
    store = KVStore(4)
    chunk = Forest([support.random_sequence(4)]).chunks(None)[0]
    x = torch.ones(1, 1, 4, 2, dtype=torch.bfloat16)
    store.write(chunk, x, x)
    for _ in range(1000):
        store.accumulate(0, 4, x, x)
    dk, _ = store.gradients(chunk)
    assert dk.dtype == torch.float32 and float(dk[0, 0, 0, 0]) == 1000.0
