"""Parts of an attention merged, by torch and by Triton's kernel, against fp64 softmax over the union of the keys."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longtune.attention import merge as module
from longtune.attention.kernels import Reference
from longtune.attention.merge import merge, merge_fused
from longtune.attention.path import PathAttention
from tests.attention.test_path import SCORES, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDED = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
WAYS = [merge, merge_fused]


@pytest.fixture(autouse=True)
def _every_size_to_the_kernel(monkeypatch):
    monkeypatch.setattr(module, "FEW", 0)


def parts(count: int, H: int, S: int, E: int, dtype: torch.dtype, token_major: bool, seed: int = 0):
    """Outputs and log-sum-exps of parts of very unequal weight, and both over all parts in fp64."""
    generator = torch.Generator().manual_seed(seed)
    outs, lses = [], []
    for _ in range(count):
        shape = (1, S, H, E) if token_major else (1, H, S, E)
        out = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        outs.append(out.transpose(1, 2) if token_major else out)
        lses.append((8 * torch.randn(1, H, S, generator=generator)).to(DEVICE))
    total = torch.logsumexp(torch.stack([l.double() for l in lses]), 0)
    truth = sum(o.double() * torch.exp(l.double() - total)[..., None] for o, l in zip(outs, lses, strict=True))
    return outs, lses, truth, total


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("shape", [(4, 37, 8), (3, 5, 24), (1, 1, 128), (32, 65, 80), (2, 40, 256)], ids=str)
def test_any_number_of_parts(way, dtype, count, shape):
    for token_major in (True, False):
        outs, lses, truth, total = parts(count, *shape, dtype, token_major)
        out, lse = outs[0], lses[0]
        for at in range(1, count):
            out, lse = way(out, lse, outs[at], lses[at], last=at == count - 1)
        assert out.dtype == dtype and lse.dtype == torch.float32
        assert float(torch.linalg.norm(out.double() - truth) / torch.linalg.norm(truth)) < ROUNDED[dtype]
        assert torch.allclose(lse.double(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_many_parts_are_rounded_once(way):
    """A sum that were rounded to fp16 at each of 40 parts would be several times farther away."""
    outs, lses, truth, _ = parts(40, 2, 64, 16, torch.float16, True)
    lses = [torch.zeros_like(l) for l in lses]
    truth = sum(o.double() for o in outs) / 40
    out, lse = outs[0], lses[0]
    for at in range(1, 40):
        out, lse = way(out, lse, outs[at], lses[at], last=at == 39)
        assert out.dtype == (torch.float16 if at == 39 else torch.float32)
    assert float(torch.linalg.norm(out.double() - truth) / torch.linalg.norm(truth)) < 3e-4


@pytest.mark.parametrize("way", WAYS)
def test_what_a_part_weighs_nothing_of_is_left_as_it_was(way):
    outs, lses, _, _ = parts(2, 2, 9, 16, torch.float32, True)
    first = outs[0].clone()
    for far in (200.0, 3e38):
        out, lse = way(first.clone(), torch.zeros_like(lses[0]), outs[1], torch.full_like(lses[1], -far), last=True)
        assert torch.equal(out, first) and not lse.any()


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_some_columns_of_a_chunk(way):
    """Slices of wider tensors, as spans of a chunk are."""
    outs, lses, truth, total = parts(2, 4, 50, 16, torch.float16, True)
    cut = slice(7, 33)
    out, lse = way(*(x[:, :, cut] for x in (outs[0], lses[0], outs[1], lses[1])), last=True)
    assert float((out.double() - truth[:, :, cut]).abs().max()) < 4e-3
    assert torch.allclose(lse.double(), total[:, :, cut], atol=1e-5)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("score", ["plain", "sinks", "softcap"])
@pytest.mark.parametrize("chunk_tokens", [3, 8, None])
def test_paths_equal_an_explicit_mask(score, chunk_tokens):
    attention = PathAttention(Reference(), Reference(), block_keys=1, merge=merge_fused)
    check(attention, SCORES[score], chunk_tokens, dtype=torch.float32, tolerance=3e-6, device=DEVICE)
