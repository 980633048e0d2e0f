"""Frozen layers whose weight stays packed: linear, embedding, head tied to an embedding, and stacks of experts.

The weight is dequantised for each call and forgotten after it; the backward dequantises it again. `opened` keeps the
numbers for the length of one layer's work. What the bits mean is said in `formats`; files are read in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from longtune.model.packed.formats import Format
from longtune.model.packed.kernel import dequantise_rows

Rows = slice | torch.Tensor


class PackedWeight(nn.Module):
    """Packed numbers [*, R, C] with the names they have in MLX's files, as buffers.

    Moving the module to another device moves them; casting it changes `compute_dtype` alone, never what is stored.

    Attributes:
        weight: packed words [*, R, W], 32-bit.
        scales: [*, R, G], floating (affine) or uint8 codes.
        biases: [*, R, G], for affine; else None.
        global_scale: fp32 scalar or [*] (one for each expert), for nvfp4; else None.
        columns: C.
        compute_dtype: dtype of the numbers where a call names none.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None
    global_scale: torch.Tensor | None

    def __init__(
        self,
        format: Format,
        columns: int,
        weight: torch.Tensor,
        scales: torch.Tensor,
        biases: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        *,
        compute_dtype: torch.dtype,
    ):
        super().__init__()
        check_shapes(format, columns, weight, scales, biases, global_scale)
        self.format = format
        self.columns = columns
        self.compute_dtype = compute_dtype
        # torch has few operations for uint32; the bits are the same.
        self.register_buffer("weight", weight.view(torch.int32))
        self.register_buffer("scales", scales)
        self.register_buffer("biases", biases)
        self.register_buffer("global_scale", global_scale)
        self._open: dict[torch.dtype, torch.Tensor] | None = None

    @property
    def stored_bits(self) -> float:
        return float(self.format.bits)

    @property
    def shape(self) -> torch.Size:
        """Of the numbers."""
        return torch.Size([*self.weight.shape[:-1], self.columns])

    def dequantise(
        self, dtype: torch.dtype | None = None, rows: Rows | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The numbers [*, R, C], or [n, C] for some rows (of the flattened leading axes).

        Args:
            out: where to write them, dense, with a dtype of its own; None makes a new tensor.
        """
        words, scales = self.weight.flatten(0, -2), self.scales.flatten(0, -2)
        biases = None if self.biases is None else self.biases.flatten(0, -2)
        shared = self.global_scale
        if shared is not None and shared.ndim:
            shared = shared.reshape(-1).repeat_interleave(words.shape[0] // shared.numel())
        shape = self.shape
        if rows is not None:
            words, scales = words[rows], scales[rows]
            biases = None if biases is None else biases[rows]
            shared = shared[rows] if shared is not None and shared.ndim else shared
            shape = torch.Size([words.shape[0], self.columns])
        if out is None:
            out = torch.empty(shape, dtype=dtype or self.compute_dtype, device=words.device)
        dequantise_rows(self.format, words, scales, biases, shared, out.view(-1, self.columns))
        return out

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """As `dequantise`, but the kept tensor while the layer is open (see `opened`): not to be written to."""
        if self._open is None:
            return self.dequantise(dtype)
        if dtype not in self._open:
            self._open[dtype] = self.dequantise(dtype)
        return self._open[dtype]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedWeight:
        # Casting scales would change the weight: only the device of the buffers may follow.
        held = dict(self._buffers)
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device))
        try:
            self._buffers.clear()
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(held)
        self.compute_dtype = probe.dtype
        for name, buffer in held.items():
            self._buffers[name] = None if buffer is None else buffer.to(probe.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.format}"


class PackedLinear(PackedWeight):
    """A frozen linear, y = x W^T + b, with W [out, in] packed.

    Args:
        bias: [out], plain.
    """

    bias: nn.Parameter | None

    def __init__(self, *args: Any, bias: torch.Tensor | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in the dtype of x (that of autocast, where it is on)."""
        return frozen_linear(x, self.numbers, self.bias)


class PackedEmbedding(PackedWeight):
    """A frozen embedding; only the rows that are asked for are dequantised.

    Args:
        scale: multiplies the rows after they are cast, as Gemma's embeddings do; None where nothing does.
    """

    def __init__(self, *args: Any, padding_idx: int | None = None, scale: torch.Tensor | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = padding_idx
        self.scale = scale

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """int [...] -> [..., dim] in `compute_dtype`."""
        rows = self.dequantise(rows=token.reshape(-1)).view(*token.shape, self.columns)
        return rows if self.scale is None else rows * self.scale.to(rows)


class TiedHead(nn.Module):
    """An output head that computes with a packed embedding's numbers and holds none of its own."""

    def __init__(self, embedding: PackedEmbedding, bias: torch.Tensor | None = None):
        super().__init__()
        # In a tuple, so that the embedding isn't registered, saved or moved twice.
        self._embedding = (embedding,)
        self.out_features, self.in_features = embedding.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def source(self) -> PackedEmbedding:
        return self._embedding[0]

    @property
    def weight(self) -> torch.Tensor:
        """The packed words."""
        return self.source.weight

    @property
    def stored_bits(self) -> float:
        return self.source.stored_bits

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.source.compute_dtype

    def dequantise(
        self, dtype: torch.dtype | None = None, rows: Rows | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.source.dequantise(dtype, rows, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return frozen_linear(x, self.source.numbers, cast(Any, self.bias))


class PackedExperts(nn.Module):
    """Takes the place of an experts' parameter [E, out, in] (or its transpose); `experts[e]` stands for a matrix.

    What transformers' own experts do with `experts[e]` (a linear, or a matrix product) works, and dequantises that
    expert alone. Gate and up, which MLX stores apart, are laid side by side or interleaved as the architecture wants.

    Args:
        parts: packed weights [E, R, C] each.
        interleaved: rows of the parts alternate (gate 0, up 0, gate 1, ...).
        transposed: the parameter was [E, in, out].
    """

    def __init__(self, parts: list[PackedWeight], *, interleaved: bool = False, transposed: bool = False):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.interleaved, self.transposed = interleaved, transposed

    @property
    def stored_bits(self) -> float:
        """The mean over the parts, which are equally large."""
        return sum(part.stored_bits for part in self._parts) / len(self._parts)

    @property
    def shape(self) -> torch.Size:
        """Of the parameter whose place it takes."""
        experts, rows, columns = self._parts[0].shape
        rows *= len(self._parts)
        return torch.Size([experts, columns, rows] if self.transposed else [experts, rows, columns])

    @property
    def dtype(self) -> torch.dtype:
        return self._parts[0].compute_dtype

    @property
    def device(self) -> torch.device:
        return self._parts[0].weight.device

    @property
    def _parts(self) -> list[PackedWeight]:
        return cast(list[PackedWeight], list(self.parts))

    def dequantise(self, dtype: torch.dtype | None = None, rows: Rows | None = None) -> torch.Tensor:
        """All numbers, [E, out, in] whatever `transposed`; `rows` chooses experts."""
        chosen = range(self.shape[0])[rows] if isinstance(rows, slice) else rows.tolist() if rows is not None else None
        experts = range(self.shape[0]) if chosen is None else chosen
        return torch.stack([self.expert(e, dtype or self.dtype) for e in experts])

    def expert(self, e: int, dtype: torch.dtype) -> torch.Tensor:
        """The numbers [out, in] of one expert."""
        parts = []
        for part in self._parts:
            count = part.shape[1]
            if part._open is None:
                parts.append(part.dequantise(dtype, slice(e * count, (e + 1) * count)))
            else:
                parts.append(part.numbers(dtype)[e])
        if len(parts) == 1:
            return parts[0]
        return torch.stack(parts, 1).flatten(0, 1) if self.interleaved else torch.cat(parts)

    def __getitem__(self, e: int | torch.Tensor) -> ExpertMatrix:
        if isinstance(e, torch.Tensor) and e.numel() != 1:
            raise TypeError(
                "packed experts are computed one at a time: load the model with experts_implementation eager"
            )
        # A number without a value stands for any expert: a plan is being made, and they are of one size.
        known = not isinstance(e, torch.Tensor) or not e.is_meta
        return ExpertMatrix(self, int(e) if known else 0)


class ExpertMatrix:
    """One expert's matrix, not yet dequantised: may stand as the weight of a linear or right of a matrix product."""

    def __init__(self, experts: PackedExperts, e: int):
        self.experts, self.e = experts, e

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        given: list[Any] = [*args, *(kwargs or {}).values(), None]
        if func is F.linear:
            x, matrix, bias = given[:3]
            wants = False
        elif func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            x, matrix, bias, wants = given[0], given[1], None, True
        else:
            raise NotImplementedError(f"{getattr(func, '__name__', func)} of packed experts")
        if not isinstance(matrix, ExpertMatrix) or matrix.experts.transposed is not wants:
            raise NotImplementedError("packed experts stand as a linear's weight only as the architecture stored them")
        return frozen_linear(x, matrix.numbers, bias)

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        return self.experts.expert(self.e, dtype)


def frozen_linear(
    x: torch.Tensor, numbers: Callable[[torch.dtype], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + b with a frozen W that is made when it is needed, in the forward and again in the backward.

    Args:
        x: [..., in]. numbers: gives W [out, in] in a dtype. bias: [out].

    Returns:
        [..., out] in the dtype of x (that of autocast, where it is on).
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return cast(Any, _product)(x, bias, numbers)  # The decorator hides its parameters from a type checker.


# A compiled layer leaves its graph here: what is dequantised, kept for a while, or made again is no part of it.
@torch.compiler.disable
def _product(
    x: torch.Tensor, bias: torch.Tensor | None, numbers: Callable[[torch.dtype], torch.Tensor]
) -> torch.Tensor:
    return cast(torch.Tensor, _FrozenLinear.apply(x, bias, numbers))


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, numbers: Any) -> torch.Tensor:
        ctx.numbers = numbers
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, numbers(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        dx = dy @ ctx.numbers(dy.dtype) if ctx.needs_input_grad[0] else None
        dbias = None
        if ctx.needs_input_grad[1]:
            dbias = dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias_dtype)
        return dx, dbias, None


def check_shapes(
    format: Format,
    columns: int,
    weight: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    global_scale: torch.Tensor | None,
) -> None:
    """Raise ValueError, saying what is wrong, unless the tensors are those of one weight in this format."""
    if weight.dtype not in (torch.uint32, torch.int32):
        raise ValueError(f"weight is {_name(weight)}, not packed in uint32")
    rows = list(weight.shape[:-1])
    if weight.ndim < 2 or weight.shape[-1] != format.words(columns):
        wanted = f"[..., {format.words(columns)}]"
        raise ValueError(f"weight is {list(weight.shape)}, but {format} rows of {columns} are {wanted}")
    shape = [*rows, format.groups(columns)]
    if list(scales.shape) != shape:
        raise ValueError(f"scales are {list(scales.shape)}, not {shape}")
    if format.mode == "affine":
        if not scales.is_floating_point():
            raise ValueError(f"scales are {_name(scales)}, not floating")
        if biases is None:
            raise ValueError("biases are missing")
        if not biases.is_floating_point():
            raise ValueError(f"biases are {_name(biases)}, not floating")
        if list(biases.shape) != shape:
            raise ValueError(f"biases are {list(biases.shape)}, not {shape}")
    else:
        if scales.dtype != torch.uint8:
            raise ValueError(f"scales are {_name(scales)}, not uint8")
        if biases is not None:
            raise ValueError(f"{format} has no biases")
    if global_scale is not None:
        if format.mode != "nvfp4":
            raise ValueError(f"{format} has no global_scale")
        if global_scale.numel() != 1 and list(global_scale.shape) != rows[:-1]:
            raise ValueError(f"global_scale is {list(global_scale.shape)}, not a scalar or {rows[:-1]}")


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
