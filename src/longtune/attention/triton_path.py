"""Attention of a whole chunk over its tree paths by Triton: softcap, windows, any widths, any number of spans.

What torch's own kernels cannot do, or only with masks, copies or a loop over spans: one launch forward, and backward
dQ, and dK with dV straight into the store's accumulators. No keys are gathered or repeated: the kernels
(`triton_kernels.py`) read the KV store through tables of tiles that are made once for a chunk. The results are the same
bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from longtune.attention.path import Memo, Score, cut, join
from longtune.attention.store import KVStore
from longtune.attention.varlen import FEW_SPANS
from longtune.tree import Chunk, Span


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tile sizes of one kernel: queries, keys; warps and pipeline stages."""

    queries: int
    keys: int
    warps: int = 8
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tile sizes of the three kernels."""

    forward: Blocks
    dq: Blocks
    dkv: Blocks


_HALF: dict[int, tuple[Sizes, ...]] = {
    64: (
        Sizes(Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3)),
        Sizes(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3)),
        Sizes(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    ),
    128: (
        Sizes(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
        Sizes(Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(32, 128, 8, 2)),
        Sizes(Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 1), Blocks(32, 64, 4, 1)),
    ),
    256: (
        Sizes(Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(32, 64, 8, 2)),
        Sizes(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1), Blocks(16, 64, 8, 1)),
        Sizes(Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
    ),
}
"""Half precision, by the wider of the two widths, rounded up; for much and for little shared memory. The first ones are
chosen by measurement on an H200 (docs/kernels.md)."""

_HALF_SHORT: dict[int, Sizes] = {128: Sizes(Blocks(64, 32, 4, 2), Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 3))}
"""Where no query sees many keys: sliding windows, packed short rows. Chosen likewise."""

_SINGLE: dict[int, Sizes] = {
    64: Sizes(Blocks(64, 32, 8, 1), Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1)),
    128: Sizes(Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    256: Sizes(Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}
"""fp32: what fits the registers and 99 KiB of shared memory."""


def sizes(width: int, value_width: int, dtype: torch.dtype, short: bool, shared: int = 232_448) -> Sizes:
    """Tile sizes for head widths, for few or many keys to a query, in so many bytes of shared memory a program."""
    widest = next(size for size in _HALF if size >= max(width, value_width))
    if dtype == torch.float32:
        return _SINGLE[widest]
    found = _HALF[widest]
    if short and widest in _HALF_SHORT:
        found = (_HALF_SHORT[widest], *found)
    return Sizes(*(_first_fitting(kernel, found, widest, shared) for kernel in ("forward", "dq", "dkv")))


def _first_fitting(kernel: str, found: tuple[Sizes, ...], width: int, shared: int) -> Blocks:
    tried = [getattr(one, kernel) for one in found]
    return next((blocks for blocks in tried if needed(kernel, blocks, width) <= shared), tried[-1])


def needed(kernel: str, blocks: Blocks, width: int) -> int:
    """Bytes of shared memory that a kernel takes at most: what stays, and the stages of what passes by."""
    queries, keys = blocks.queries * width * 2, blocks.keys * width * 2
    stays, passes = {"forward": (queries, 2 * keys), "dq": (2 * queries, 2 * keys), "dkv": (2 * keys, 2 * queries)}[
        kernel
    ]
    return stays + blocks.stages * passes + 1024


@cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return 232_448
    # Without the figure: what every card since compute capability 8.6 has.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 101_376)


@dataclass(frozen=True, slots=True)
class Tables:
    """int32 tables of a chunk, on its device.

    Attributes:
        query_tiles: [n, 5] column of the chunk, queries, position, first and last (excluded) of its ranges.
        ranges: [n, 3] column of the row, keys, position.
        key_tiles: [n, 5] column of the row, keys, position, first and last (excluded) of its readers.
        readers: [n, 3] column of the chunk, queries, position.
    """

    query_tiles: torch.Tensor
    ranges: torch.Tensor
    key_tiles: torch.Tensor
    readers: torch.Tensor


def _seen(span: Span, window: int | None) -> list[tuple[int, int, int]]:
    """Column, length and position of the ranges that some query of the span sees, in path order."""
    unseen = 0 if window is None else max(0, span.position - window + 1)
    position = unseen
    found = []
    for start, end in cut(join(span.past, span.start, span.end), unseen):
        found.append((start, end - start, position))
        position += end - start
    return found


def _tiles(begin: int, end: int, step: int, position: int, first: int, last: int) -> np.ndarray:
    """[n, 5]: column, length and position of the pieces of [begin, end), whose first column is at `position`, and the
    bounds that they have in common."""
    column = np.arange(begin, end, step, dtype=np.int32)
    made = np.empty((column.size, 5), dtype=np.int32)
    made[:, 0] = column
    made[:, 1] = np.minimum(end - column, step)
    made[:, 2] = column + (position - begin)
    made[:, 3], made[:, 4] = first, last
    return made


def make_tables(chunk: Chunk, window: int | None, device: torch.device, *, query_block: int, key_block: int) -> Tables:
    """The tables of a chunk, with tiles of `query_block` queries and of `key_block` keys."""
    ranges: list[tuple[int, int, int]] = []
    query_tiles: list[np.ndarray] = []
    # Per run of columns that is read, its position and the spans that read it: whole runs, then cut where any begins.
    reads: list[tuple[int, int, int, Span]] = []
    for span in chunk.spans:
        seen = _seen(span, window)
        begin, end = span.start - chunk.start, span.end - chunk.start
        query_tiles.append(_tiles(begin, end, query_block, span.position, len(ranges), len(ranges) + len(seen)))
        ranges += seen
        reads += [(column, column + length, position, span) for column, length, position in seen]
    key_tiles: list[np.ndarray] = []
    readers: list[tuple[int, int, int]] = []
    for begin, end, position, spans in _segments(reads):
        readers_before = len(readers)
        readers += [(s.start - chunk.start, s.end - s.start, s.position) for s in spans]
        key_tiles.append(_tiles(begin, end, key_block, position, readers_before, len(readers)))
    # The last tiles of a chunk have the most keys to see: they go first.
    made = (np.concatenate(query_tiles)[::-1], ranges, np.concatenate(key_tiles), readers)
    return Tables(*(torch.from_numpy(np.array(x, dtype=np.int32)).to(device) for x in made))


def _segments(reads: list[tuple[int, int, int, Span]]) -> list[tuple[int, int, int, list[Span]]]:
    """Disjoint runs of columns, each with its position and all the spans that read it, in the spans' order."""
    edges = sorted({edge for begin, end, _, _ in reads for edge in (begin, end)})
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for index, (begin, end, _, _) in enumerate(reads):
        opening.setdefault(begin, []).append(index)
        closing.setdefault(end, []).append(index)
    found = []
    alive: dict[int, None] = {}
    for low, high in pairwise(edges):
        for index in closing.get(low, ()):
            del alive[index]
        for index in opening.get(low, ()):
            alive[index] = None
        if alive:
            begin, _, position, _ = reads[next(iter(alive))]
            found.append((low, high, position + low - begin, [reads[index][3] for index in sorted(alive)]))
    return found


class TritonPath:
    """The contract of `path.PathKernel`; bf16, fp16 and fp32 on CUDA.

    Args:
        always: take every chunk, not only those that other kernels can't (tests, benchmarks).
        grain: take chunks of at least so many tokens with a span whose length is no multiple of it too.
        windows: take windows that cut, whatever the widths: there is no other kernel for them.
        forced: tile sizes instead of the measured ones.
    """

    name = "triton"

    def __init__(
        self, always: bool = False, grain: int | None = None, windows: bool = False, forced: Sizes | None = None
    ):
        self._always = always
        self._windows = windows
        self._grain = grain
        self._forced = forced
        self._memos: dict[tuple[int, int], Memo[Tables]] = {}

    def accepts(self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score) -> bool:
        """Whether this is the way to compute a chunk."""
        k, v = store.keys_and_values
        if max(k.shape[3], v.shape[3]) > 256 or max(k.numel(), v.numel(), q_BHCD.numel()) >= 2**31:
            return False
        if self._always or score.softcap is not None:
            return True
        if _cuts(chunk, score):
            return self._windows or v.shape[3] != k.shape[3] or k.shape[3] % 8 != 0
        if len(chunk.spans) > FEW_SPANS:
            return True
        # Short chunks aren't worth a kernel's compilation: an engine's own trials have six tokens.
        if self._grain is None or chunk.size < self._grain:
            return False
        return any((span.end - span.start) % self._grain for span in chunk.spans)

    def _sizes(self, q: torch.Tensor, v: torch.Tensor, chunk: Chunk, score: Score) -> Sizes:
        short = len(chunk.spans) > FEW_SPANS or _cuts(chunk, score)
        return self._forced or sizes(q.shape[3], v.shape[3], q.dtype, short, _shared(q.device))

    def _tables(self, chunk: Chunk, score: Score, device: torch.device, queries: int, keys: int) -> Tables:
        key = (queries, keys)
        if key not in self._memos:
            self._memos[key] = Memo(partial(make_tables, query_block=queries, key_block=keys))
        return self._memos[key](chunk, score.window, device)

    @staticmethod
    def _options(q: torch.Tensor, v: torch.Tensor, score: Score, chunk: Chunk, blocks: Blocks) -> dict[str, Any]:
        width, value_width = q.shape[3], v.shape[3]
        block_d, block_e = (max(16, 1 << (n - 1).bit_length()) for n in (width, value_width))
        return dict(
            width=width,
            value_width=value_width,
            window=score.window or 0,
            scale=score.scale,
            softcap=score.softcap or 1.0,
            HAS_WINDOW=_cuts(chunk, score),
            HAS_SOFTCAP=score.softcap is not None,
            PADDED_D=block_d != width,
            PADDED_E=block_e != value_width,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            # Products of fp32 are split in three of tf32 each.
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def forward(
        self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [1, H, C, E] and log-sum-exp fp32 [1, H, C], sinks left out."""
        from longtune.attention.triton_kernels import forward_kernel, launch

        k, v = store.keys_and_values
        q = _dense(q_BHCD)
        H, C = q.shape[1:3]
        blocks = self._sizes(q, v, chunk, score)
        tables = self._tables(chunk, score, q.device, blocks.forward.queries, blocks.dkv.keys)
        # Token-major, as transformers wants it next.
        out = torch.empty(1, C, H, v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty(1, H, C, dtype=torch.float32, device=q.device)
        launch(
            forward_kernel,
            (tables.query_tiles.shape[0], H),
            q,
            k,
            v,
            out,
            lse,
            tables.query_tiles,
            tables.ranges,
            *_strides(q),
            *_token_strides(k),
            *_token_strides(v),
            *_strides(out),
            lse.stride(1),
            H // k.shape[2],
            **self._options(q, v, score, chunk, blocks.forward),
        )
        return out, lse

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
        from longtune.attention.triton_kernels import delta_kernel, dkv_kernel, dq_kernel, launch

        k, v = store.keys_and_values
        adds = not store.is_fresh(chunk)
        dk, dv = store.accumulators if adds else store.unset_accumulators()
        q, dout, out, lse = (_dense(x) for x in (q_BHCD, dout_BHCE, out_BHCE, lse_BHC))
        H, C = q.shape[1:3]
        blocks = self._sizes(q, v, chunk, score)
        delta = torch.empty_like(lse)
        options = self._options(q, v, score, chunk, blocks.dq)
        narrow: dict[str, Any] = {"value_width": options["value_width"], "BLOCK_E": options["BLOCK_E"], "BLOCK_M": 64}
        launch(
            delta_kernel,
            (-(-C // 64), H),
            dout,
            out,
            delta,
            *_strides(dout),
            *_strides(out),
            delta.stride(1),
            C,
            **narrow,
        )
        dq = torch.empty_like(q, memory_format=layout)
        tables = self._tables(chunk, score, q.device, blocks.dq.queries, blocks.dkv.keys)
        launch(
            dq_kernel,
            (tables.query_tiles.shape[0], H),
            dout,
            q,
            k,
            v,
            lse,
            delta,
            dq,
            tables.query_tiles,
            tables.ranges,
            *_strides(dout),
            *_strides(q),
            *_token_strides(k),
            *_token_strides(v),
            *_strides(dq),
            lse.stride(1),
            H // k.shape[2],
            **options,
        )
        launch(
            dkv_kernel,
            (tables.key_tiles.shape[0], k.shape[2]),
            dout,
            q,
            k,
            v,
            lse,
            delta,
            dk,
            dv,
            tables.key_tiles,
            tables.readers,
            *_strides(dout),
            *_strides(q),
            *_token_strides(k),
            *_token_strides(v),
            *_token_strides(dk),
            *_token_strides(dv),
            lse.stride(1),
            H // k.shape[2],
            ADDS=adds,
            **self._options(q, v, score, chunk, blocks.dkv),
        )
        return dq


def probe(device: torch.device) -> None:
    """Compile and run the smallest kernel; raises whatever is wrong with triton on a device."""
    from longtune.attention.triton_kernels import delta_kernel, launch

    ones, found = torch.ones(16, 16, device=device), torch.empty(1, 16, device=device)
    options = {"value_width": 16, "BLOCK_M": 16, "BLOCK_E": 16}
    launch(delta_kernel, (1, 1), ones, ones, found, 16, 0, 16, 0, 16, 16, **options)
    if not bool((found == 16).all()):
        raise RuntimeError(f"a sum of 16 ones gave {float(found[0, 0])}")


def _cuts(chunk: Chunk, score: Score) -> bool:
    """Whether the window hides a token of its path from some query of the chunk."""
    return any(score.cuts(span) for span in chunk.spans)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only where its last axis isn't dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x_BHCD: torch.Tensor) -> tuple[int, int]:
    """Of a token and of a head."""
    return x_BHCD.stride(2), x_BHCD.stride(1)


def _token_strides(x_BTHD: torch.Tensor) -> tuple[int, int]:
    return x_BTHD.stride(1), x_BTHD.stride(2)
