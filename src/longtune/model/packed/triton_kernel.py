"""The Triton kernel that dequantises packed rows; `formats.dequantise_reference` is its reference.

A row is cut in units: the fewest words that hold whole numbers, eight or more (three words of 3 or 6 bits, five of 5).
A thread reads a unit's words, makes its numbers in registers, where shifts are constants, and writes them side by side,
16 bytes and more at once. Multiply-add fusion is off: it would round once where the format rounds twice.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: RUF005 (a kernel's tuples know no unpacking)

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from longtune.model.packed.formats import NVFP4_RANGE, Format


@triton.jit
def _scale(scales, steps, shared, group, mask, TABLES: tl.constexpr, HAS_GLOBAL: tl.constexpr):
    scale = tl.load(scales + group, mask=mask, other=0)
    if TABLES:
        scale = tl.load(steps + scale.to(tl.int32), mask=mask, other=0.0)
        if HAS_GLOBAL:
            scale = scale * shared
    else:
        scale = scale.to(tl.float32)
    return scale


@triton.jit
def _numbers(
    words,
    scale,
    bias,
    values,
    steps,
    shared,
    unit,
    columns,
    word0: tl.constexpr,
    first: tl.constexpr,
    stride: tl.constexpr,
    EACH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLES: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Numbers `first`, `first + stride`, ... of each unit, fp32: one of them [U], or two halves joined, [U, 2, 2, ...].

    `words` from `word0` on are those of the units; `scale` and `bias` are numbers where a unit lies in one group, else
    pointers to those of the row.
    """
    if stride == EACH:
        word: tl.constexpr = word0 + first * BITS // 32
        shift: tl.constexpr = first * BITS % 32
        code = words[word] >> shift
        if shift + BITS > 32:
            code = code | (words[word + 1] << (32 - shift))
        code = (code & ((1 << BITS) - 1)).to(tl.int32)
        if GROUP % EACH != 0:
            column = unit * EACH + first
            mask = column < columns
            if HAS_BIAS:
                bias = tl.load(bias + column // GROUP, mask=mask, other=0).to(tl.float32)
            scale = _scale(scale, steps, shared, column // GROUP, mask, TABLES, HAS_GLOBAL)
        if TABLES:
            value = tl.load(values + code)
        else:
            value = code.to(tl.float32)
        result = value * scale
        if HAS_BIAS:
            result = result + bias
        return result
    else:
        even = _numbers(
            words, scale, bias, values, steps, shared, unit, columns, word0,
            first, 2 * stride, EACH, BITS, GROUP, TABLES, HAS_GLOBAL, HAS_BIAS,
        )  # fmt: skip
        odd = _numbers(
            words, scale, bias, values, steps, shared, unit, columns, word0,
            first + stride, 2 * stride, EACH, BITS, GROUP, TABLES, HAS_GLOBAL, HAS_BIAS,
        )  # fmt: skip
        return tl.join(even, odd)


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
    out_stride,
    global_stride,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    EACH: tl.constexpr,
    TABLES: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
    RANGE: tl.constexpr,
):
    """BLOCK_R rows of BLOCK_U units of UNIT words and EACH numbers."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    # One unit to a thread, though its words could be read four at once: neighbouring threads then write neighbouring
    # numbers, and nothing passes through shared memory.
    unit = tl.max_contiguous(tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U), 1)
    column = tl.program_id(1) * BLOCK_U * EACH + tl.arange(0, BLOCK_U * EACH)
    # All that is read is asked for before anything is made of it.
    read, scale, bias, shared = (), (), (), ()
    for index in tl.static_range(BLOCK_R):
        row = first + index
        # Rows beyond the last have no columns, and no words.
        inside = unit * EACH < tl.where(row < rows, columns, 0)
        there = tl.where(row < rows, row_words, 0)
        for place in tl.static_range(UNIT):
            word = unit * UNIT + place
            bits = tl.load(words + row * row_words + word, mask=word < there, other=0)
            read = read + (bits.to(tl.uint32, bitcast=True),)
        factor = 1.0
        if HAS_GLOBAL:
            factor = tl.div_rn(tl.load(global_scale + row * global_stride, mask=row < rows, other=1.0), RANGE)
        own = tl.minimum(row, rows - 1) * row_groups
        if GROUP % EACH == 0:
            group = own + unit * EACH // GROUP
            scale = scale + (_scale(scales, steps, factor, group, inside, TABLES, HAS_GLOBAL),)
            if HAS_BIAS:
                bias = bias + (tl.load(biases + group, mask=inside, other=0).to(tl.float32),)
        else:
            # Of rows beyond the last, the last one's: nothing comes of them.
            scale, bias = scale + (scales + own,), bias + (biases + own,)
        shared = shared + (factor,)
    for index in tl.static_range(BLOCK_R):
        row = first + index
        numbers = _numbers(
            read, scale[index], bias[index] if HAS_BIAS else scale[index], values, steps, shared[index], unit, columns,
            index * UNIT, 0, 1, EACH, BITS, GROUP, TABLES, HAS_GLOBAL, HAS_BIAS,
        )  # fmt: skip
        flat = tl.reshape(numbers.to(out.dtype.element_ty), [BLOCK_U * EACH])
        tl.store(out + row * out_stride + column, flat, mask=column < tl.where(row < rows, columns, 0))


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
    unit = math.lcm(format.bits * 8, 32) // 32
    each = 32 * unit // format.bits
    warps = min(4, triton.cdiv(triton.cdiv(columns, each), 32))
    warps = triton.next_power_of_2(warps)
    block_u, block_r = 32 * warps, 32 // each
    # Rows first: there may be more than a grid's second axis has room for.
    grid = (triton.cdiv(rows, block_r), triton.cdiv(columns, block_u * each))
    nothing = out  # A pointer for what the mode doesn't have: it is never read.
    kernel: Any = _dequantise
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
        out.stride(0),
        1 if global_scale is not None and global_scale.numel() > 1 else 0,
        GROUP=format.group_size,
        BITS=format.bits,
        UNIT=unit,
        EACH=each,
        TABLES=format.mode != "affine",
        HAS_GLOBAL=global_scale is not None,
        HAS_BIAS=biases is not None,
        BLOCK_R=block_r,
        BLOCK_U=block_u,
        RANGE=NVFP4_RANGE,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return out
