"""The head's matrix for the GPU heads: dense, or packed and dequantised a slice of the vocabulary at a time.

Both give h W^T and g W for a block of tokens, through the library's matrix products with fp32 accumulation.

Shapes: C tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

SLICE_BYTES = 64 << 20
"""Bytes of dequantised rows alive at once."""


WIDENS = ("cuda", "meta")
"""Kinds of devices whose products give fp32 from half precision."""


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out = a b, in out's dtype (that of a and b, or fp32)."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.device.type in WIDENS:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b, out in fp32 (or the dtype of a and b)."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif a.device.type in WIDENS:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def add_products(out_PMN: torch.Tensor, a_PMK: torch.Tensor, b_PKN: torch.Tensor) -> None:
    """out += a b for each of P, out in fp32 (or the dtype of a and b)."""
    if out_PMN.dtype == a_PMK.dtype:
        out_PMN.baddbmm_(a_PMK, b_PKN)
    elif a_PMK.device.type in WIDENS:
        torch.baddbmm(out_PMN, a_PMK, b_PKN, out_dtype=out_PMN.dtype, out=out_PMN)
    else:
        out_PMN.baddbmm_(a_PMK.to(out_PMN.dtype), b_PKN.to(out_PMN.dtype))


class Matrix(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        ...

    def buffer(self, rows: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory that `rows` fills with so many rows at most, where it fills any."""
        ...

    def rows(self, own: slice, buffer: torch.Tensor | None) -> torch.Tensor:
        """Neighbouring rows, [n, H]: valid until the buffer is filled again."""
        ...

    def rows_of(self, token_M: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """A matrix that holds the rows of some tokens: the whole one, whose rows are indexed by token (True), or
        theirs alone, [M, H] (False)."""
        ...

    def scores_into(self, out_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        """out = hidden W^T; out in hidden's dtype or fp32."""
        ...

    def hidden_gradient(self, gradient_CV: torch.Tensor) -> torch.Tensor:
        """gradient W, [C, H], in the gradient's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """weight [V, H]."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def buffer(self, rows: int, dtype: torch.dtype) -> None:
        return None

    def rows(self, own: slice, buffer: torch.Tensor | None) -> torch.Tensor:
        return self.weight[own]

    def rows_of(self, token_M: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        return self.weight, True

    def scores_into(self, out_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        product_into(out_CV, hidden_CH, self.weight.t())

    def hidden_gradient(self, gradient_CV: torch.Tensor) -> torch.Tensor:
        C, V = gradient_CV.shape
        H = self.weight.shape[1]
        parts = even_parts(C, V, H) if gradient_CV.device.type in WIDENS and gradient_CV.dtype != torch.float32 else 1
        if parts == 1:
            return gradient_CV @ self.weight
        # Few tokens and a narrow model leave the product without enough output tiles to fill a GPU, while its inner
        # dimension is the vocabulary: that is cut in parts, summed in fp32.
        a = gradient_CV.unflatten(1, (parts, V // parts)).transpose(0, 1)
        b = self.weight.unflatten(0, (parts, V // parts))
        return torch.bmm(a, b, out_dtype=torch.float32).sum(0).to(gradient_CV.dtype)


def even_parts(C: int, V: int, H: int, tile: int = 128 * 256, processors: int = 128) -> int:
    """Equal parts of the inner dimension V of a product [C, V] x [V, H] that together have output tiles for a GPU."""
    tiles = -(-C * H // tile)
    for parts in (1, 2, 4, 8):
        if tiles * parts >= processors or V % (2 * parts) or V // (2 * parts) % 8:
            return parts
    return 8


class Packed(Protocol):
    """A packed matrix [V, H] that dequantises some of its rows (`model.packed.PackedLinear`, `TiedHead`)."""

    out_features: int
    in_features: int

    @property
    def weight(self) -> torch.Tensor: ...

    def dequantise(
        self,
        dtype: torch.dtype | None = None,
        rows: slice | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed matrix, dequantised into at most `SLICE_BYTES` at once, for every product again."""

    source: Packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.out_features, self.source.in_features

    def buffer(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        words = self.source.weight
        return torch.empty(rows, self.shape[1], dtype=dtype, device=words.device)

    def rows(self, own: slice, buffer: torch.Tensor | None) -> torch.Tensor:
        assert buffer is not None
        return self.source.dequantise(rows=own, out=buffer[: own.stop - own.start])

    def rows_of(self, token_M: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        return self.source.dequantise(dtype, token_M), False

    def _slices(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        V, H = self.shape
        rows = max(128, SLICE_BYTES // (H * dtype.itemsize) // 128 * 128)
        for start in range(0, V, rows):
            own = slice(start, min(start + rows, V))
            yield own, self.source.dequantise(dtype, own)

    def scores_into(self, out_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        for own, weight in self._slices(hidden_CH.dtype):
            product_into(out_CV[:, own], hidden_CH, weight.t())

    def hidden_gradient(self, gradient_CV: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(gradient_CV.dtype, torch.float32)
        total = gradient_CV.new_zeros(gradient_CV.shape[0], self.shape[1], dtype=wide)
        for own, weight in self._slices(gradient_CV.dtype):
            add_product(total, gradient_CV[:, own], weight)
            del weight
        return total.to(gradient_CV.dtype)
