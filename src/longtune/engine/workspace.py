"""What operations take and do: temporaries inside kernels, and floating-point work and traffic, by shapes.

A dispatch mode sees the tensors that operations return, not what a kernel allocates for itself. Those that matter are
listed here, from torch's sources: one rule for each operation. Work is counted too, for `cost.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Work:
    """What a stretch of a walk computes.

    Attributes:
        products: floating-point operations of matrix products that arithmetic bounds on any device.
        thin_products, thin_bytes: floating-point operations, and bytes read and written, of matrix products that memory
            bounds on a GPU.
        moved: bytes read and written by everything else on the device.
        forward, backward: query-key pairs x heads x (key + value width) of attention.
        launches: operations.
    """

    products: float = 0.0
    thin_products: float = 0.0
    thin_bytes: float = 0.0
    moved: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    launches: float = 0.0

    def add(self, other: Work) -> None:
        self.products += other.products
        self.thin_products += other.thin_products
        self.thin_bytes += other.thin_bytes
        self.moved += other.moved
        self.forward += other.forward
        self.backward += other.backward
        self.launches += other.launches

    def scaled(self, factor: float) -> Work:
        return Work(*(getattr(self, name) * factor for name in FIELDS))

    def __add__(self, other: Work) -> Work:
        return self.plus(other)

    def plus(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in FIELDS))


FIELDS = ("products", "thin_products", "thin_bytes", "moved", "forward", "backward", "launches")

_THIN = 100.0
"""Floating-point operations per byte below which a matrix product may be bound by memory."""


def _size(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0


def _tensors(args: Any) -> list[torch.Tensor]:
    found = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [y for y in x if isinstance(y, torch.Tensor)]
    return found


def temporaries(kind: str, name: str, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> int:
    """Bytes that an operation takes inside itself, on a device of type `kind` ("cpu", "cuda")."""
    if name == "logsumexp":
        return _size(args[0])  # exp(x - max)
    if name == "_flash_attention_backward":
        _dout, q, k, _v = args[:4]
        sequences = args[6].numel() - 1 if isinstance(args[6], torch.Tensor) else q.shape[0]
        return _flash_backward(q.shape[:-2].numel(), k.shape[:-2].numel(), sequences, q, k)
    if name == "_scaled_dot_product_cudnn_attention_backward":
        _dout, q, k, _v = args[:4]
        return _cudnn_backward(q, k)
    return 0


def _flash_backward(queries: int, keys: int, sequences: int, q: torch.Tensor, k: torch.Tensor) -> int:
    """FlashAttention-2: dQ is summed in fp32 and the row sums of dO * O are kept, in rows rounded up to 128; under
    grouped heads dK and dV are made for every query head and then added up."""
    heads, width = q.shape[-2], -(-q.shape[-1] // 32) * 32
    rows = -(-queries // 128) * 128 + (128 * sequences if sequences > 1 else 0)
    grouped = 2 * keys * heads * q.shape[-1] * k.element_size() if k.shape[-2] != heads else 0
    return heads * rows * (width + 1) * 4 + grouped


def _cudnn_backward(q: torch.Tensor, k: torch.Tensor) -> int:
    """cuDNN: the same, without the rounding."""
    B, H, S, D = q.shape
    grouped = 2 * B * H * k.shape[2] * D * k.element_size() if k.shape[1] != H else 0
    return B * H * S * (D + 1) * 4 + grouped


_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_grouped_mm": (0, 1)}
_FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "set_", "resize_"}


def work_of(name: str, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> Work:
    """What an operation computes and moves."""
    if name in _FREE:
        return Work()
    if name in _PRODUCTS:
        a, b = (args[i] for i in _PRODUCTS[name])
        flops = 2.0 * a.numel() * b.shape[-1]
        moved = float(_size(a) + _size(b) + _size(outs[0]))
        if flops < _THIN * moved:
            return Work(thin_products=flops, thin_bytes=moved, launches=1)
        return Work(products=flops, launches=1)
    if "attention" in name:
        return _attention(name, args, kwargs)
    return Work(moved=float(sum(_size(x) for x in _tensors(args)) + sum(_size(x) for x in outs)), launches=1)


_CAUSAL = {
    "_flash_attention_forward": 8,
    "_flash_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}
"""Where `is_causal` stands among the arguments."""


def _attention(name: str, args: Any, kwargs: Any) -> Work:
    backward = name.endswith("backward")
    q, k, v = args[1:4] if backward else args[0:3]
    place = _CAUSAL.get(name, 0)
    causal = bool(kwargs.get("is_causal", args[place] if place and len(args) > place else False))
    if name.startswith("_flash"):
        heads, queries, keys = q.shape[-2], q.shape[:-2].numel(), k.shape[:-2].numel()
        ends = args[6 if backward else 3]
    else:
        heads, queries, keys, ends = q.shape[1], q.shape[0] * q.shape[2], k.shape[2], None
    sequences = ends.numel() - 1 if isinstance(ends, torch.Tensor) else 1
    seen = keys / sequences
    if causal:
        seen -= (queries / sequences - 1) / 2
    if (window := kwargs.get("window_size_left")) is not None:
        seen = min(seen, window + 1)
    pairs = float(heads * queries * seen * (q.shape[-1] + v.shape[-1]))
    return Work(backward=pairs, launches=3) if backward else Work(forward=pairs, launches=3)
