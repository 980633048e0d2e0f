"""Spans as sequences of varying length: the tables on the CPU, the launch done by the reference; on CUDA the launch."""

from __future__ import annotations

import pytest
import torch

from longtune.attention import varlen
from longtune.attention.kernels import Reference
from longtune.attention.path import PathAttention, Score
from longtune.attention.varlen import VarlenFlash
from longtune.tree import Forest
from tests import support
from tests.attention.test_path import SCORES, check, forest

CUDA = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


class Sequences(VarlenFlash):
    """Does what the launch is said to do, one sequence after another."""

    def _pieces(self, q, k, launch, score):
        assert int(launch.query_ends[-1]) == q.shape[0] and int(launch.key_ends[-1]) == k.shape[0]
        for index in range(launch.query_ends.numel() - 1):
            queries, keys = (slice(*map(int, ends[index : index + 2])) for ends in (launch.query_ends, launch.key_ends))
            S, T = queries.stop - queries.start, keys.stop - keys.start
            assert S <= launch.most_queries and T <= launch.most_keys
            distance = torch.arange(T - S, T)[:, None] - torch.arange(T)[None]
            mask = (distance >= 0) & (distance < (score.window or T))
            yield queries, keys, {"scale": score.scale, "mask": mask}

    @staticmethod
    def _heads(*tensors):
        return (x.transpose(0, 1)[None] for x in tensors)

    def _forward(self, q, k, v, launch, score):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for queries, keys, options in self._pieces(q, k, launch, score):
            o, l = Reference().forward(*self._heads(q[queries], k[keys], v[keys]), **options)
            out[queries], lse[:, queries] = o[0].transpose(0, 1), l[0]
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, launch, score):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for queries, keys, options in self._pieces(q, k, launch, score):
            dout_, q_, k_, v_, out_ = self._heads(dout[queries], q[queries], k[keys], v[keys], out[queries])
            found = Reference().backward(dout_, q_, k_, v_, out_, lse[None, :, queries], **options)
            dq[queries], dk[keys], dv[keys] = (x[0].transpose(0, 1) for x in found)
        return dq, dk, dv


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("score", [s for s in SCORES.values() if s.softcap is None], ids=str)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 8])
@pytest.mark.parametrize("few, keys", [(3, 8), (0, 8), (0, 1)], ids=["default", "always", "small launches"])
def test_spans_equal_an_explicit_mask(score, chunk_tokens, few, keys, monkeypatch):
    monkeypatch.setattr(varlen, "FEW_SPANS", few)
    monkeypatch.setattr(varlen, "KEYS_PER_TOKEN", keys)
    kernel = Sequences()
    shape = (4, 2, 8, 6)
    check(PathAttention(Reference(), Reference(), 4, [kernel]), score, chunk_tokens, shape=shape)


def test_plain_packed_rows_read_the_store_where_it_is():
    row = Forest([support.random_sequence(n) for n in (5, 3, 9, 1)])
    for chunk in row.chunks(7):
        (launch,) = varlen._launches(chunk, None, torch.device("cpu"))
        assert isinstance(launch.columns, slice) and launch.rounds is None


def test_a_shared_prompt_is_added_back_in_rounds_of_distinct_columns():
    row = Forest([support.pair_tree(6, (3, 2)), support.random_sequence(4)])
    (launch,) = varlen._launches(row.chunks(None)[0], None, torch.device("cpu"))
    assert isinstance(launch.columns, torch.Tensor) and launch.rounds is not None and len(launch.rounds) == 3
    for place in launch.rounds:
        assert launch.columns[place].unique().numel() == place.numel()
    assert sorted(torch.cat(launch.rounds).tolist()) == list(range(launch.columns.numel()))


def test_keys_are_bounded_by_the_window():
    row = Forest([support.random_sequence(400)])
    chunk = row.chunks(100)[3]
    (launch,) = varlen._launches(chunk, 30, torch.device("cpu"))
    assert launch.columns == slice(300 - 29, 400)


@pytest.mark.skipif(not CUDA, reason="needs CUDA and FlashAttention-2")
@pytest.mark.parametrize("score", [Score(0.1), Score(0.1, window=1), Score(0.1, window=40)], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (8, 8, 128, 96), (4, 1, 256, 256)], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)], ids=str)
def test_flash_equals_an_explicit_mask(score, shape, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(varlen, "FEW_SPANS", 0)
    attention = PathAttention(Reference(), Reference(), paths=[VarlenFlash()])
    long = Forest([support.pair_tree(300, (70, 129)), support.random_sequence(257), support.random_sequence(1)])
    for row in (forest(), long):
        for chunk_tokens in (None, 100):
            check(attention, score, chunk_tokens, dtype=dtype, tolerance=tolerance, device="cuda", row=row, shape=shape)
