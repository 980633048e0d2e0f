"""The Triton kernel against the torch reference, bit for bit, under Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from longtune.model.packed.formats import (
    AFFINE_BITS,
    Format,
    dequantise_reference,
    float_format,
    scale_table,
    value_table,
)
from longtune.model.packed.kernel import uses_triton

pytest.importorskip("triton", reason="the kernel is written in triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def both(format: Format, rows: int, columns: int, dtype: torch.dtype, scale_dtype=torch.float32, shared=None):
    """(kernel's, reference's) numbers of random words."""
    from longtune.model.packed.triton_kernel import dequantise_triton

    draw = torch.Generator().manual_seed(rows * columns)
    words = torch.randint(-(2**31), 2**31, (rows, format.words(columns)), generator=draw, dtype=torch.int64).int()
    shape = (rows, format.groups(columns))
    affine = format.mode == "affine"
    if affine:
        scales = torch.randn(shape, generator=draw).to(scale_dtype)
        biases = torch.randn(shape, generator=draw).to(scale_dtype)
    else:
        # Around one, so that nothing leaves the range of half precision.
        scales, biases = torch.randint(40, 60, shape, generator=draw).to(torch.uint8), None
        if format.mode != "nvfp4":
            scales += 70
        if format.mode == "mxfp8":
            data = words.numpy().view(np.uint8)
            data[(data & 0x7F) == 0x7F] = 0
    tensors = [None if x is None else x.to(DEVICE) for x in (words, scales, biases, shared)]
    tables = [None if affine else table(format.mode).to(DEVICE) for table in (value_table, scale_table)]
    ours = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
    theirs = torch.empty_like(ours)
    dequantise_triton(format, *tensors, *tables, ours)
    return ours, dequantise_reference(format, *tensors, theirs)


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_every_width_is_equal(bits):
    ours, theirs = both(Format("affine", bits, 32), 5, 544, torch.float32)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 32, 32), (7, 9, 3), (4, 512, 64), (9, 33, 11)])
def test_every_size_is_equal(rows, columns, group):
    for bits in (3, 4):
        ours, theirs = both(Format("affine", bits, group), rows, columns, torch.float32)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_modes_are_equal(mode, dtype):
    ours, theirs = both(float_format(mode), 5, 96, dtype)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shared", [torch.tensor(5.123), torch.tensor([0.5, 3.0, 900.0])])
def test_global_scales_are_equal(shared):
    ours, theirs = both(float_format("nvfp4"), 3, 64, torch.float32, shared=shared)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_equal(dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter cuts numbers to bfloat16 instead of rounding them")
    ours, theirs = both(Format("affine", 6, 32), 3, 96, dtype, scale_dtype=dtype)
    assert torch.equal(ours, theirs)


def test_the_kernel_is_for_cuda_alone():
    assert not uses_triton(torch.empty(2))
