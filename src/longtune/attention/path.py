"""Exact attention of one chunk over its paths: blocks of a kernel merged by log-sum-exp.

A chunk's queries see, for each span, all earlier tokens of the span's path and the span itself up to the query. The
earlier tokens are column ranges of the KV store; each range is attended in blocks of at most `block_keys` keys, the
span's own square causally, and the parts are merged by log-sum-exp. A sliding window cuts the path, not the row:
queries are then taken in short blocks, each over the few keys that it can see. Sinks are one more term of the
softmax's denominator, so they only rescale the merged output. No score matrix is larger than a kernel's block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from longtune.attention.kernels import Kernel
from longtune.attention.merge import Merge, merge
from longtune.attention.store import KVStore
from longtune.tree import Chunk, Span

WINDOW_BLOCK = 512
"""Queries taken at once under a sliding window."""


@dataclass(frozen=True, slots=True)
class Score:
    """How a layer scores: scale of q k, softcap, sliding window (in positions, a query sees itself and the window - 1
    tokens before it on its path), and sinks (one logit per query head, [H])."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None

    def cuts(self, span: Span) -> bool:
        """Whether the window hides a token of its path from some query of the span."""
        return self.window is not None and self.window < span.position + span.end - span.start


class PathKernel(Protocol):
    """Computes a whole chunk over its paths in few launches, where it can and is meant to (`accepts`).

    Sinks are left to the caller: outputs and log-sum-exps are without them going out, and with them coming back.
    """

    name: str

    def accepts(self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score) -> bool: ...

    def forward(
        self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PathAttention.forward`."""
        ...

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
        """As `PathAttention.backward`."""
        ...


Made = TypeVar("Made")


class Memo(Generic[Made]):
    """What a path kernel makes once for a chunk and window, and uses in every layer; the latest ones are kept.

    Args:
        make: from the chunk, the window and the device.
    """

    def __init__(self, make: Callable[[Chunk, int | None, torch.device], Made], most: int = 256):
        self._make = make
        self._most = most
        self._made: OrderedDict[tuple[int, int | None, torch.device], tuple[Chunk, Made]] = OrderedDict()

    def __call__(self, chunk: Chunk, window: int | None, device: torch.device) -> Made:
        key = (id(chunk), window, device)
        # The chunk is kept beside its tables: while it lives, no other has its id.
        if key not in self._made:
            self._made[key] = (chunk, self._make(chunk, window, device))
            if len(self._made) > self._most:
                self._made.popitem(last=False)
        return self._made[key][1]


@dataclass(frozen=True, slots=True)
class _Part:
    """One block: some queries of the chunk against some columns of the store.

    Attributes:
        queries: columns of the chunk (counted from its start).
        columns: ranges of the row, in path order.
        causal: the queries are the keys' own tokens.
        mask: boolean [queries, keys] under a window that cuts through the block.
    """

    queries: slice
    columns: tuple[tuple[int, int], ...]
    causal: bool = False
    mask: torch.Tensor | None = None


def cut(ranges: Sequence[tuple[int, int]], drop: int) -> tuple[tuple[int, int], ...]:
    """The ranges without their first `drop` columns."""
    kept = []
    for start, end in ranges:
        skipped = min(drop, end - start)
        drop -= skipped
        if start + skipped < end:
            kept.append((start + skipped, end))
    return tuple(kept)


def join(ranges: Sequence[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    """The ranges and [start, end), merged with the last one where they touch."""
    if ranges and ranges[-1][1] == start:
        return (*ranges[:-1], (ranges[-1][0], end))
    return (*ranges, (start, end))


def _blocks(start: int, end: int, block: int, largest: int) -> Iterator[tuple[int, int]]:
    """[start, end) in blocks of block x 1, 2, 4, ... up to `largest`, large ones first: few blocks of few sizes."""
    while start < end:
        size = largest
        while size > block and size > end - start:
            size //= 2
        yield start, min(start + size, end)
        start += size


def _parts(
    span: Span, origin: int, window: int | None, block: int, largest: int, device: torch.device
) -> Iterator[_Part]:
    """The blocks that make up one span's attention."""
    length = span.end - span.start
    if window is None or window >= span.position + length:
        queries = slice(span.start - origin, span.end - origin)
        for start, end in span.past:
            for columns in _blocks(start, end, block, largest):
                yield _Part(queries, (columns,))
        yield _Part(queries, ((span.start, span.end),), causal=True)
        return
    for low in range(0, length, WINDOW_BLOCK):
        high = min(low + WINDOW_BLOCK, length)
        first_seen = max(0, span.position + low - window + 1)
        columns = cut(join(span.past, span.start, span.start + high), first_seen)
        query = torch.arange(span.position + low, span.position + high, device=device)
        key = torch.arange(first_seen, span.position + high, device=device)
        distance = query[:, None] - key[None, :]
        mask = (distance >= 0) & (distance < window)
        yield _Part(slice(span.start - origin + low, span.start - origin + high), columns, mask=mask)


def _read(store: KVStore, columns: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    pieces = [store.read(start, end) for start, end in columns]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([k for k, _ in pieces], dim=2), torch.cat([v for _, v in pieces], dim=2)


class PathAttention:
    """Attention over token-tree paths with one kernel.

    Args:
        kernel: the block backend.
        fallback: used where `kernel` lacks softcap.
        block_keys: keys of a block in the backward; bounds the temporaries of a kernel. A forward has none that grow
            with the keys: its blocks are up to four times as long, so that fewer are merged.
        paths: kernels that compute some chunks as a whole instead; the first that accepts one does.
        merge: merges the blocks of a forward.
    """

    def __init__(
        self,
        kernel: Kernel,
        fallback: Kernel,
        block_keys: int = 8192,
        paths: Sequence[PathKernel] = (),
        merge: Merge = merge,
    ):
        self.kernel = kernel
        self.merge = merge
        self.fallback = fallback
        self.block_keys = block_keys
        self.paths = tuple(paths)

    def _whole(self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score) -> PathKernel | None:
        return next((kernel for kernel in self.paths if kernel.accepts(q_BHCD, store, chunk, score)), None)

    def _kernel(self, score: Score) -> Kernel:
        return self.kernel if score.softcap is None or self.kernel.supports_softcap else self.fallback

    def forward(
        self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [1, H, C, E] in the queries' dtype and log-sum-exp [1, H, C] in fp32 (fp64), sinks included."""
        whole = self._whole(q_BHCD, store, chunk, score)
        out, lse = (whole.forward if whole else self._forward_blocks)(q_BHCD, store, chunk, score)
        if score.sinks is not None:
            total = torch.logaddexp(lse, score.sinks.to(lse.dtype)[None, :, None])
            out = (out * torch.exp(lse - total)[..., None]).to(out.dtype)
            lse = total
        return out, lse

    def _forward_blocks(
        self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernel = self._kernel(score)
        q_BHCD = kernel.arrange(q_BHCD)
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None
        block = self.block_keys
        for span in chunk.spans:
            parts = list(_parts(span, chunk.start, score.window, block, 4 * block, q_BHCD.device))
            shared: tuple[torch.Tensor, torch.Tensor] | None = None
            for part in parts:
                k, v = _read(store, part.columns)
                q = q_BHCD[:, :, part.queries]
                o, l = kernel.forward(
                    q, k, v, scale=score.scale, causal=part.causal, mask=part.mask, softcap=score.softcap
                )
                if part.mask is None and len(parts) > 1:
                    last = part is parts[-1]
                    shared = (o, l) if shared is None else self.merge(*shared, o, l, last=last)
                    if not last:
                        continue
                    o, l = shared
                if out is None or lse is None:
                    if part.queries == slice(0, chunk.size):
                        out, lse = o, l
                        continue
                    out = q.new_empty(*q_BHCD.shape[:3], o.shape[3])
                    lse = l.new_empty(q_BHCD.shape[:3])
                out[:, :, part.queries] = o
                lse[:, :, part.queries] = l
        assert out is not None and lse is not None
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
        """dQ [1, H, C, D]; the store's accumulators receive dK and dV of everything that the chunk read.

        Args:
            layout: of dQ, for a kernel that can lay it out in several ways (`preserve_format`: as the queries are).
        """
        if whole := self._whole(q_BHCD, store, chunk, score):
            return whole.backward(dout_BHCE, q_BHCD, out_BHCE, lse_BHC, store, chunk, score, layout)
        kernel = self._kernel(score)
        dout_BHCE, q_BHCD, out_BHCE = (kernel.arrange(x) for x in (dout_BHCE, q_BHCD, out_BHCE))
        dq: torch.Tensor | None = None
        block = self.block_keys
        for span in chunk.spans:
            parts = list(_parts(span, chunk.start, score.window, block, block, q_BHCD.device))
            for part in parts:
                k, v = _read(store, part.columns)
                rows = part.queries
                dq_part, dk, dv = kernel.backward(
                    dout_BHCE[:, :, rows],
                    q_BHCD[:, :, rows],
                    k,
                    v,
                    out_BHCE[:, :, rows],
                    lse_BHC[:, :, rows],
                    scale=score.scale,
                    causal=part.causal,
                    mask=part.mask,
                    softcap=score.softcap,
                )
                if len(parts) == 1 and rows == slice(0, chunk.size):
                    dq = dq_part
                else:
                    if dq is None:
                        dq = torch.zeros_like(q_BHCD, dtype=torch.promote_types(q_BHCD.dtype, torch.float32))
                    dq[:, :, rows] += dq_part
                at = 0
                for start, end in part.columns:
                    size = end - start
                    store.accumulate(start, end, dk[:, :, at : at + size], dv[:, :, at : at + size])
                    at += size
        assert dq is not None
        return dq.to(q_BHCD.dtype)
