"""Dequantising where the weight is: a Triton kernel on CUDA, plain torch elsewhere, the same bits either way.

`formats.dequantise_reference` is what the kernel must equal. The kernel reads each packed word where its numbers are
made and writes nothing but the result, so that it runs at the speed of memory.
"""

from __future__ import annotations

from functools import cache

import torch

from longtune.model.packed.formats import Format, Mode, dequantise_reference, scale_table, value_table
from longtune.model.triton_here import triton_fault


def dequantise_rows(
    format: Format,
    words: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` [R, C]; arguments as for `formats.dequantise_reference`."""
    if out.is_meta:
        return out  # No values: a plan is being made.
    if out.numel() and uses_triton(out):
        from longtune.model.packed.triton_kernel import dequantise_triton

        values, steps = (None, None) if format.mode == "affine" else _tables(format.mode, out.device)
        return dequantise_triton(format, words, scales, biases, global_scale, values, steps, out)
    return dequantise_reference(format, words, scales, biases, global_scale, out)


def uses_triton(out: torch.Tensor) -> bool:
    """Whether the Triton kernel fills this tensor: on CUDA where triton runs, but not in fp64."""
    known = out.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return out.is_cuda and known and triton_fault(out.device) is None


@cache
def _tables(mode: Mode, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a float mode, on a device: copied there once."""
    return value_table(mode).to(device), scale_table(mode).to(device)
