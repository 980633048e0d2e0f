"""Keeping one layer's dequantised weights while all chunks of a row pass through it.

The walk runs every chunk through a layer before it goes on to the next one. Inside `layer_open` each packed weight of
the layer is dequantised once, not once a chunk; outside nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from longtune.model.members import modules_of
from longtune.model.packed.modules import PackedWeight


@contextmanager
def layer_open(layer: nn.Module, limit: int | None = None) -> Iterator[int]:
    """Keep the numbers of a layer's packed weights, as they are first asked for, until the context ends.

    Args:
        layer: a decoder layer (or any module); without packed weights nothing happens.
        limit: bytes of dequantised numbers that may be kept, in the modules' compute dtype; weights are taken in the
            order of the modules, one that would pass the limit is dequantised for each call as before. None: all.

    Yields:
        the bytes that will be kept at most.
    """
    chosen: list[PackedWeight] = []
    total = 0
    for module in modules_of(layer):
        if isinstance(module, PackedWeight) and module._open is None:
            size = module.shape.numel() * module.compute_dtype.itemsize
            if limit is None or total + size <= limit:
                chosen.append(module)
                total += size
    for module in chosen:
        module._open = {}
    try:
        yield total
    finally:
        for module in chosen:
            module._open = None


def open_bytes(layer: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of a layer's packed weights once dequantised: what `layer_open` would keep."""
    return sum(
        module.shape.numel() * (dtype or module.compute_dtype).itemsize
        for module in modules_of(layer)
        if isinstance(module, PackedWeight)
    )
