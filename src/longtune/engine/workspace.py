"""What operations take and do: temporaries inside kernels, and floating-point work and traffic, by shapes.

A dispatch mode sees the tensors that operations return, not what a kernel allocates for itself. Those that matter are
listed here, from torch's sources: one rule for each operation. Work is counted too, for `cost.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Work:
    """What a stretch of a walk computes.

    Attributes:
        products: (floating-point operations, bytes) of matrix products, added up by size class: large ones are bound
            by arithmetic, thin ones by memory.
        thin_bytes: bytes read and written by matrix products that memory bounds.
        moved: bytes read and written by everything else on the device.
        forward, backward: query-key pairs x heads x (key + value width) of attention.
        launches: operations.
    """

    products: float = 0.0
    thin_bytes: float = 0.0
    moved: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    launches: float = 0.0

    def add(self, other: Work) -> None:
        self.products += other.products
        self.thin_bytes += other.thin_bytes
        self.moved += other.moved
        self.forward += other.forward
        self.backward += other.backward
        self.launches += other.launches

    def scaled(self, factor: float) -> Work:
        return Work(*(getattr(self, name) * factor for name in FIELDS))

    def plus(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in FIELDS))


FIELDS = ("products", "thin_bytes", "moved", "forward", "backward", "launches")

_THIN = 100.0
"""Floating-point operations per byte below which a matrix product is bound by memory."""


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
        # dQ is summed in fp32 and the row sums of dO * O are kept, in rows rounded to 128; under grouped heads, dK
        # and dV are made for every query head and then added up.
        dout, q, k, v = args[:4]
        B, S, H, D = q.shape
        rows, width = -(-S // 128) * 128, -(-D // 32) * 32
        extra = B * H * rows * (width + 1) * 4
        if k.shape[2] != H:
            extra += 2 * B * k.shape[1] * H * D * k.element_size()
        return extra
    if name == "_scaled_dot_product_cudnn_attention_backward":
        dout, q, k, v = args[:4]
        B, H, S, D = q.shape
        return B * H * S * (D + 1) * 4 + (2 * B * H * k.shape[2] * D * k.element_size() if k.shape[1] != H else 0)
    if kind == "cpu":
        if name == "_scaled_dot_product_flash_attention_for_cpu_backward" and args[1].element_size() == 2:
            return 0
        if name in ("scatter_add_", "index_add_", "index_put_"):
            return 0
    return 0


_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_grouped_mm": (0, 1)}
_FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "set_", "resize_"}


def work_of(name: str, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> Work:
    """What an operation computes and moves."""
    if name in _FREE:
        return Work()
    if name in _PRODUCTS:
        a, b = (args[i] for i in _PRODUCTS[name])
        flops = 2.0 * a.numel() * (b.shape[-1] if name != "_grouped_mm" or b.ndim < 3 else b.shape[-1])
        moved = float(_size(a) + (_size(b) if name != "_grouped_mm" else _size(b)) + _size(outs[0]))
        if flops < _THIN * moved:
            return Work(thin_bytes=moved, launches=1)
        return Work(products=flops, launches=1)
    if "attention" in name:
        return _attention(name, args, kwargs)
    return Work(moved=float(sum(_size(x) for x in _tensors(args)) + sum(_size(x) for x in outs)), launches=1)


def _attention(name: str, args: Any, kwargs: Any) -> Work:
    backward = name.endswith("backward")
    q, k, v = args[1:4] if backward else args[0:3]
    if name.startswith("_flash"):
        B, S, H, D = q.shape
        T, E = k.shape[1], v.shape[3]
    else:
        B, H, S, D = q.shape
        T, E = k.shape[2], v.shape[3]
    causal = any(x is True for x in args) or kwargs.get("is_causal", False)
    if name == "_scaled_dot_product_cudnn_attention" and not backward:
        causal = bool(args[6])
    pairs = B * H * S * T * (0.5 * (1 + 1 / max(S, 1)) if causal and S == T else 1.0) * (D + E)
    return Work(backward=pairs, launches=3) if backward else Work(forward=pairs, launches=3)


__all__ = ["FIELDS", "Work", "math", "temporaries", "work_of"]
