"""The Triton kernel that dequantises packed rows; `formats.dequantise_reference` is its reference.

A program makes a tile of BLOCK_R rows x BLOCK_C columns. `_dequantise_words` unpacks whole words, where none straddles
a number or a group. In `_dequantise` a code's place in the row's bit stream is computed, not iterated, so every other
width takes the same path; one that straddles two words reads both. Multiply-add fusion is off: it would round once
where the format rounds twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from longtune.model.packed.formats import NVFP4_RANGE, Format


@triton.jit
def _dequantise(
    words,
    scales,
    biases,
    global_scale,
    values,
    steps,
    out,
    rows,
    columns,
    row_words,
    row_groups,
    group_size,
    out_stride,
    global_stride,
    BITS: tl.constexpr,
    STRADDLES: tl.constexpr,
    TABLES: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RANGE: tl.constexpr,
    MASK: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    mask = (row < rows) & (column < columns)
    bit = column * BITS
    at = words + row * row_words + (bit >> 5)
    shift = (bit & 31).to(tl.uint32)
    code = tl.load(at, mask=mask, other=0).to(tl.uint32, bitcast=True) >> shift
    if STRADDLES:
        over = mask & ((bit & 31) + BITS > 32)
        # A shift by 32 means nothing: numbers that don't straddle shift their zeros by one.
        left = tl.where(over, 32 - shift, 1).to(tl.uint32)
        code = code | (tl.load(at + 1, mask=over, other=0).to(tl.uint32, bitcast=True) << left)
    code = (code & MASK).to(tl.int32)
    group = row * row_groups + column // group_size
    scale = tl.load(scales + group, mask=mask, other=0)
    if TABLES:
        scale = tl.load(steps + scale.to(tl.int32), mask=mask, other=0.0)
        if HAS_GLOBAL:
            scale = scale * tl.div_rn(tl.load(global_scale + row * global_stride, mask=row < rows, other=1.0), RANGE)
        value = tl.load(values + code, mask=mask, other=0.0)
    else:
        scale = scale.to(tl.float32)
        value = code.to(tl.float32)
    result = value * scale
    if HAS_BIAS:
        result = result + tl.load(biases + group, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantise_words(
    words,
    scales,
    biases,
    global_scale,
    values,
    steps,
    out,
    rows,
    columns,
    row_words,
    row_groups,
    group_size,
    out_stride,
    global_stride,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RANGE: tl.constexpr,
    MASK: tl.constexpr,
):
    """As `_dequantise`, where a word holds whole numbers of one group: each word, scale and bias is read once."""
    EACH: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK_C // EACH
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    mask = (row < rows) & (word < row_words)
    packed = tl.load(words + row * row_words + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    shift = (tl.arange(0, EACH) * BITS).to(tl.uint32)[None, None, :]
    code = ((packed[:, :, None] >> shift) & MASK).to(tl.int32)
    group = row * row_groups + word * EACH // group_size
    scale = tl.load(scales + group, mask=mask, other=0)
    if TABLES:
        scale = tl.load(steps + scale.to(tl.int32), mask=mask, other=0.0)
        if HAS_GLOBAL:
            scale = scale * tl.div_rn(tl.load(global_scale + row * global_stride, mask=row < rows, other=1.0), RANGE)
        value = tl.load(values + code)
    else:
        scale = scale.to(tl.float32)
        value = code.to(tl.float32)
    result = value * scale[:, :, None]
    if HAS_BIAS:
        result = result + tl.load(biases + group, mask=mask, other=0).to(tl.float32)[:, :, None]
    column = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    flat = tl.reshape(result.to(out.dtype.element_ty), [BLOCK_R, BLOCK_C])
    tl.store(out + row * out_stride + column, flat, mask=(row < rows) & (column < columns))


def dequantise_triton(
    format: Format,
    words: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    values: torch.Tensor | None,
    steps: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` [R, C]; see `kernel.dequantise_rows`.

    Args:
        values, steps: the tables of the mode's values and scales, on the device; None for affine.
    """
    rows, columns = out.shape
    words, scales = words.contiguous().view(torch.int32), scales.contiguous()
    biases = None if biases is None else biases.contiguous()
    if global_scale is not None:
        global_scale = global_scale.float().contiguous()
    each = 32 // format.bits
    whole = 32 % format.bits == 0 and format.group_size % each == 0
    tall, wide = (4, max(512, each)) if whole else (4, 512)
    grid = (triton.cdiv(rows, tall), triton.cdiv(columns, wide))
    nothing = out  # A pointer for what the mode doesn't have: it is never read.
    kernel: Any = _dequantise_words if whole else _dequantise
    kernel[grid](
        words,
        scales,
        nothing if biases is None else biases,
        nothing if global_scale is None else global_scale,
        nothing if values is None else values,
        nothing if steps is None else steps,
        out,
        rows,
        columns,
        words.shape[1],
        scales.shape[1],
        format.group_size,
        out.stride(0),
        1 if global_scale is not None and global_scale.numel() > 1 else 0,
        BITS=format.bits,
        TABLES=format.mode != "affine",
        HAS_GLOBAL=global_scale is not None,
        HAS_BIAS=biases is not None,
        BLOCK_R=tall,
        BLOCK_C=wide,
        RANGE=NVFP4_RANGE,
        MASK=(1 << format.bits) - 1,
        enable_fp_fusion=False,
        **({} if whole else {"STRADDLES": 32 % format.bits != 0}),
    )
    return out
