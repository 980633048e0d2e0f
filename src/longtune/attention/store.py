"""The KV store of one layer: keys and values of the whole row, and the accumulators of their gradients.

It is the only thing that the chunks of a layer share. Sharer layers (Gemma 3n, Gemma 4) use their donor's store.
"""

from __future__ import annotations

import torch

from longtune.tree import Chunk


class KVStore:
    """Keys and values of one layer for a row of T tokens.

    Tensors are kept token-major ([1, T, heads, width]) so that a chunk is contiguous; they are handed out
    head-major ([1, heads, tokens, width]) as views.

    Args:
        tokens: T.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens
        self._written: set[int] = set()
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None
        self._dk: torch.Tensor | None = None
        self._dv: torch.Tensor | None = None

    def write(self, chunk: Chunk, k_BHCD: torch.Tensor, v_BHCD: torch.Tensor) -> None:
        """Store a chunk's keys [1, heads, C, width] and values; a chunk that is already there is left alone."""
        if self.has(chunk):
            return
        if self._k is None or self._v is None:
            self._k = self._new(k_BHCD, k_BHCD.dtype)
            self._v = self._new(v_BHCD, v_BHCD.dtype)
        self._k[:, chunk.start : chunk.end] = k_BHCD.detach().transpose(1, 2)
        self._v[:, chunk.start : chunk.end] = v_BHCD.detach().transpose(1, 2)
        self._written.add(chunk.index)

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk's keys and values are there."""
        return chunk.index in self._written

    def _new(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(1, self.tokens, like.shape[1], like.shape[3], dtype=dtype, device=like.device)

    def read(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of columns [start, end), each [1, heads, end - start, width]."""
        assert self._k is not None and self._v is not None
        return self._k[:, start:end].transpose(1, 2), self._v[:, start:end].transpose(1, 2)

    @property
    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, each [1, T, heads, width]."""
        assert self._k is not None and self._v is not None
        return self._k, self._v

    def restore(self, chunks: int, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> None:
        """Take the keys and values of all `chunks` chunks from an earlier store's `keys_and_values`."""
        self._k, self._v = k_BTHD, v_BTHD
        self._written = set(range(chunks))

    def open_gradients(self) -> None:
        """Make the accumulators (zero, fp32, or fp64 for fp64 keys) if they are not there."""
        assert self._k is not None and self._v is not None
        if self._dk is None:
            wide = torch.promote_types(self._k.dtype, torch.float32)
            self._dk = torch.zeros_like(self._k, dtype=wide)
            self._dv = torch.zeros_like(self._v, dtype=wide)

    def accumulate(self, start: int, end: int, dk_BHSD: torch.Tensor, dv_BHSD: torch.Tensor) -> None:
        """Add gradients of columns [start, end)."""
        self.open_gradients()
        assert self._dk is not None and self._dv is not None
        self._dk[:, start:end] += dk_BHSD.transpose(1, 2)
        self._dv[:, start:end] += dv_BHSD.transpose(1, 2)

    def accumulate_at(self, columns_N: torch.Tensor, dk_NKD: torch.Tensor, dv_NKE: torch.Tensor) -> None:
        """Add gradients of some columns, int64 [N], no column twice."""
        dk, dv = self.accumulators
        dk[0].index_add_(0, columns_N, dk_NKD.to(dk.dtype))
        dv[0].index_add_(0, columns_N, dv_NKE.to(dv.dtype))

    @property
    def accumulators(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of all keys and values, each [1, T, heads, width], fp32 (fp64 for fp64 keys)."""
        self.open_gradients()
        assert self._dk is not None and self._dv is not None
        return self._dk, self._dv

    def is_fresh(self, chunk: Chunk) -> bool:
        """Whether a chunk is the whole row and nothing was added yet: what it adds is then all there is, so far."""
        return self._dk is None and chunk.size == self.tokens

    def unset_accumulators(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `accumulators`, but of any numbers: for who writes all of them."""
        assert self._k is not None and self._v is not None
        wide = torch.promote_types(self._k.dtype, torch.float32)
        self._dk = torch.empty_like(self._k, dtype=wide)
        self._dv = torch.empty_like(self._v, dtype=wide)
        return self._dk, self._dv

    def gradients(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Accumulated dK and dV of a chunk, in the accumulators' dtype, each [1, heads, C, width]."""
        self.open_gradients()
        assert self._dk is not None and self._dv is not None
        own = slice(chunk.start, chunk.end)
        return self._dk[:, own].transpose(1, 2), self._dv[:, own].transpose(1, 2)
