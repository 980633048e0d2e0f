"""Many spans, or a sliding window, in few launches of torch's FlashAttention-2 with sequences of varying length.

Each span of a chunk is one sequence: its queries against its path's columns, the last query beside the last key. Where
the paths lie end to end in the row (plain packed rows) the store is read as it is; where branches share a prompt their
columns are gathered, and the gradients are added back in an order that never varies. A window cuts the columns to
what some query of the span sees, and beyond that is the kernel's own argument: its cost is proportional to the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from longtune.attention.path import Memo, Score, cut, join
from longtune.attention.store import KVStore
from longtune.tree import Chunk, Span

FEW_SPANS = 3
"""Up to so many spans of a chunk, blocks of the plain kernels are faster (or no slower)."""

KEYS_PER_TOKEN = 8
"""Gathered keys of one launch at most, for each token of the chunk (a single span may have more)."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Some consecutive spans of a chunk.

    Attributes:
        queries: columns of the chunk (counted from its start).
        columns: the row's columns that hold the keys, in order: a slice, or int64 [N].
        rounds: which of the N keys to add back together: no column twice in one round, the same rounds every time.
            None: all N at once.
        query_ends, key_ends: int32 [spans + 1], cumulative lengths.
        most_queries, most_keys: of one span.
    """

    queries: slice
    columns: slice | torch.Tensor
    rounds: tuple[torch.Tensor, ...] | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int


def _ranges(span: Span, window: int | None) -> tuple[tuple[int, int], ...]:
    """The columns that some query of the span sees, in path order."""
    unseen = 0 if window is None else max(0, span.position - window + 1)
    return cut(join(span.past, span.start, span.end), unseen)


def _groups(chunk: Chunk, window: int | None) -> Iterator[list[tuple[Span, tuple[tuple[int, int], ...]]]]:
    """The spans with their key ranges, in groups of bounded size."""
    group: list[tuple[Span, tuple[tuple[int, int], ...]]] = []
    keys = 0
    for span in chunk.spans:
        ranges = _ranges(span, window)
        count = sum(end - start for start, end in ranges)
        if group and keys + count > KEYS_PER_TOKEN * chunk.size:
            yield group
            group, keys = [], 0
        group.append((span, ranges))
        keys += count
    yield group


def _rounds(columns: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    order = torch.argsort(columns, stable=True)
    ordered = columns[order]
    place = torch.arange(columns.numel())
    first = torch.searchsorted(ordered, ordered)
    turn = torch.empty_like(columns)
    turn[order] = place - first
    if not int(turn.max()):
        return None
    return tuple((turn == index).nonzero().flatten() for index in range(int(turn.max()) + 1))


def _launches(chunk: Chunk, window: int | None, device: torch.device) -> tuple[_Launch, ...]:
    made = []
    for group in _groups(chunk, window):
        merged: tuple[tuple[int, int], ...] = ()
        for _, ranges in group:
            for start, end in ranges:
                merged = join(merged, start, end)
        rounds = None
        if len(merged) == 1:
            columns = slice(*merged[0])
        else:
            index = torch.cat([torch.arange(start, end) for start, end in merged])
            rounds = _rounds(index)
            columns = index.to(device)
        queries = [span.end - span.start for span, _ in group]
        keys = [sum(end - start for start, end in ranges) for _, ranges in group]
        made.append(
            _Launch(
                slice(group[0][0].start - chunk.start, group[-1][0].end - chunk.start),
                columns,
                None if rounds is None else tuple(x.to(device) for x in rounds),
                _ends(queries, device),
                _ends(keys, device),
                max(queries),
                max(keys),
            )
        )
    return tuple(made)


def _ends(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


class VarlenFlash:
    """The contract of `path.PathKernel`; bf16 and fp16 on CUDA, widths of multiples of 8 to 256, no softcap."""

    name = "flash-varlen"

    def __init__(self) -> None:
        self._memo: Memo[tuple[_Launch, ...]] = Memo(_launches)

    def accepts(self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score) -> bool:
        """Whether this is the way to compute a chunk."""
        width, value_width = q_BHCD.shape[3], store.keys_and_values[1].shape[3]
        if score.softcap is not None or width % 8 or width > 256 or value_width > width:
            return False
        if len(chunk.spans) > FEW_SPANS:
            return True
        return any(score.cuts(span) for span in chunk.spans)

    def forward(
        self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [1, H, C, E] and log-sum-exp fp32 [1, H, C], sinks left out."""
        q_CHD = q_BHCD[0].transpose(0, 1)
        width = store.keys_and_values[1].shape[3]
        outs, lses = [], []
        for launch in self._memo(chunk, score.window, q_BHCD.device):
            k, v = _read(store, launch.columns)
            v = _widen(v, q_CHD.shape[2])
            out, lse = self._forward(q_CHD[launch.queries], k, v, launch, score)
            outs.append(out[..., :width])
            lses.append(lse)
        out_CHE = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out_CHE.transpose(0, 1)[None], (lses[0] if len(lses) == 1 else torch.cat(lses, 1))[None]

    def backward(
        self,
        dout_BHCE: torch.Tensor,
        q_BHCD: torch.Tensor,
        out_BHCE: torch.Tensor,
        lse_BHC: torch.Tensor,
        store: KVStore,
        chunk: Chunk,
        score: Score,
        layout: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """dQ [1, H, C, D]; dK and dV go to the store's accumulators."""
        width = q_BHCD.shape[3]
        dout_CHD, q_CHD, out_CHD = (_widen(x[0].transpose(0, 1), width) for x in (dout_BHCE, q_BHCD, out_BHCE))
        dqs = []
        for launch in self._memo(chunk, score.window, q_BHCD.device):
            k, v = _read(store, launch.columns)
            value_width = v.shape[2]
            rows = launch.queries
            dq, dk, dv = self._backward(
                dout_CHD[rows],
                q_CHD[rows],
                k,
                _widen(v, width),
                out_CHD[rows],
                lse_BHC[0, :, rows].contiguous(),
                launch,
                score,
            )
            dqs.append(dq)
            _accumulate(store, launch, dk, dv[..., :value_width])
        return (dqs[0] if len(dqs) == 1 else torch.cat(dqs)).transpose(0, 1)[None]

    @staticmethod
    def _window(score: Score) -> dict[str, int]:
        return {} if score.window is None else {"window_size_left": score.window - 1, "window_size_right": 0}

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: _Launch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [C, H, D], k and v [N, K, D] -> output [C, H, D] and log-sum-exp [H, C]."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            launch.query_ends,
            launch.key_ends,
            launch.most_queries,
            launch.most_keys,
            0.0,
            True,
            False,
            scale=score.scale,
            **self._window(score),
        )
        if lse.shape != (q.shape[1], q.shape[0]):
            raise RuntimeError(f"torch's flash attention gave a log-sum-exp of shape {tuple(lse.shape)}")
        return out, lse

    def _backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        launch: _Launch,
        score: Score,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            launch.query_ends,
            launch.key_ends,
            launch.most_queries,
            launch.most_keys,
            0.0,
            True,
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=score.scale,
            **self._window(score),
        )


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _read(store: KVStore, columns: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [N, heads, width] of some columns."""
    k, v = (x[0] for x in store.keys_and_values)
    if isinstance(columns, slice):
        return k[columns], v[columns]
    return k.index_select(0, columns), v.index_select(0, columns)


def _accumulate(store: KVStore, launch: _Launch, dk: torch.Tensor, dv: torch.Tensor) -> None:
    columns = launch.columns
    if isinstance(columns, slice):
        store.accumulate(columns.start, columns.stop, dk.transpose(0, 1)[None], dv.transpose(0, 1)[None])
        return
    for place in launch.rounds or (slice(None),):
        # Each column once in a call: the order of the additions to it is that of the rounds.
        store.accumulate_at(columns[place], dk[place], dv[place])
