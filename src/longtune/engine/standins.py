"""Stand-ins, in a trace, for the kernels of attention on CUDA that no tensor without memory runs through: the same
bytes, and exact counts of work.

Which chunks they take is asked of the kernels themselves. FlashAttention-2 over sequences of varying length runs as it
is on tensors without memory; of Triton's kernels the outputs are made here, as nothing that triton compiles runs
without a device. Their work is counted in query-key pairs, weighted by how much slower than the device's block kernel
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from longtune.attention.merge import fuses, merge, room
from longtune.attention.path import PathAttention, PathKernel, Score
from longtune.attention.store import KVStore
from longtune.attention.triton_path import TritonPath
from longtune.engine.workspace import Work
from longtune.tree import Chunk


@dataclass(frozen=True, slots=True)
class _Pace:
    """Rates of a kernel on an H200 in TFLOP/s, and how many keys more a query costs than it sees: tiles that are partly
    masked, and what a launch takes however short a sequence is (fitted to bench/attention.py)."""

    forward: float
    backward: float
    forward_keys: int = 0
    backward_keys: int = 0


_BLOCKS = {"cudnn": _Pace(620, 510), "cuda-flash": _Pace(345, 296)}
_WHOLE = {"triton": _Pace(485, 320, 560, 310), "flash-varlen": _Pace(345, 296, 700, 450)}
_CAPPED = 0.70
"""What softcap leaves of Triton's rates."""


class Watch:
    """Where the stand-ins of a ghost report to: the meter of the walk in work, if there is one.

    Attributes:
        count: receives work.
        silent: while set, operations of attention are not counted by themselves.
    """

    def __init__(self) -> None:
        self.count: Callable[[Work], None] | None = None
        self.silent = False

    @contextmanager
    def silence(self) -> Iterator[None]:
        self.silent = True
        try:
            yield
        finally:
            self.silent = False


class Standin:
    """The contract of `path.PathKernel`, on tensors without memory.

    Args:
        kernel: what is stood for.
        blocks: name of the block kernel whose rates the device is known by.
    """

    def __init__(self, kernel: PathKernel, blocks: str, watch: Watch):
        self.kernel = kernel
        self.name = kernel.name
        self._watch = watch
        own = _WHOLE[kernel.name]
        known = _BLOCKS.get(blocks, own)
        self._own = own
        self._slower = known.forward / own.forward, known.backward / own.backward

    def accepts(self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score) -> bool:
        return self.kernel.accepts(q_BHCD, store, chunk, score)

    def _report(self, q: torch.Tensor, store: KVStore, chunk: Chunk, score: Score, backward: bool) -> None:
        if self._watch.count is None:
            return
        k, v = store.keys_and_values
        keys = self._own.backward_keys if backward else self._own.forward_keys
        pairs = q.shape[1] * (seen_pairs(chunk, score.window) + keys * chunk.size) * (k.shape[3] + v.shape[3])
        pairs *= self._slower[backward] / (1.0 if score.softcap is None else _CAPPED)
        self._watch.count(Work(backward=pairs, launches=6) if backward else Work(forward=pairs, launches=3))

    def forward(
        self, q_BHCD: torch.Tensor, store: KVStore, chunk: Chunk, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._report(q_BHCD, store, chunk, score, False)
        if not isinstance(self.kernel, TritonPath):
            with self._watch.silence():
                return self.kernel.forward(q_BHCD, store, chunk, score)
        v = store.keys_and_values[1]
        _, H, C, _ = q_BHCD.shape
        return _token_major(q_BHCD, v.shape[3]), q_BHCD.new_empty(1, H, C, dtype=torch.float32)

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
        self._report(q_BHCD, store, chunk, score, True)
        if not isinstance(self.kernel, TritonPath):
            with self._watch.silence():
                return self.kernel.backward(dout_BHCE, q_BHCD, out_BHCE, lse_BHC, store, chunk, score)
        store.open_gradients()
        dense = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHCD, dout_BHCE, out_BHCE, lse_BHC)]
        delta = torch.empty_like(lse_BHC)
        dq = _token_major(q_BHCD, q_BHCD.shape[3])
        del dense, delta
        return dq


def _token_major(q_BHCD: torch.Tensor, width: int) -> torch.Tensor:
    _, H, C, _ = q_BHCD.shape
    return q_BHCD.new_empty(1, C, H, width).transpose(1, 2)


def seen_pairs(chunk: Chunk, window: int | None) -> int:
    """Pairs of a query of the chunk and a key that it sees, of one head."""
    total = 0
    for span in chunk.spans:
        first, length = span.position + 1, span.end - span.start
        whole = length if window is None else max(0, min(length, window - first + 1))
        # Queries that see all of their path, then those that see a full window.
        total += whole * first + whole * (whole - 1) // 2 + (length - whole) * (window or 0)
    return total


class MergeStandin:
    """The contract of `merge.Merge`: what `merge_fused` takes and moves."""

    def __init__(self, watch: Watch):
        self._watch = watch

    def __call__(
        self,
        out_BHSE: torch.Tensor,
        lse_BHS: torch.Tensor,
        part_BHSE: torch.Tensor,
        part_lse_BHS: torch.Tensor,
        *,
        last: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not fuses(part_BHSE):
            return merge(out_BHSE, lse_BHS, part_BHSE, part_lse_BHS, last=last)
        made, total = room(out_BHSE, part_BHSE, last)
        if self._watch.count is not None:
            passed = (out_BHSE, lse_BHS, part_BHSE, part_lse_BHS, made, total)
            self._watch.count(Work(moved=float(sum(x.numel() * x.element_size() for x in passed)), launches=1))
        return made, total


def stand_in(attention: PathAttention, kernels: Sequence[PathKernel], merges: bool, watch: Watch) -> None:
    """Give an attention that runs without memory what stands for a device's whole-chunk kernels and, where the device
    `merges` blocks by a kernel, for that."""
    attention.paths = tuple(Standin(kernel, attention.kernel.name, watch) for kernel in kernels)
    if merges:
        attention.merge = MergeStandin(watch)
