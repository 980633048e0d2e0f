"""Triton kernels that make logits tile by tile and keep none: the log-sum-exp, and one slice's gradient.

A tile is BLOCK_M tokens x BLOCK_V columns of the vocabulary, scores accumulated in fp32 and never rounded. The matrix
is read dense, or as affine-packed words that are unpacked in registers. `online.py` says when they run.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from longtune.head.triton_logits import bend


@triton.jit
def _tile_scores(
    hidden_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    row,
    row_inside,
    column,
    column_inside,
    stride_hidden,
    stride_weight,
    stride_scale,
    hidden_size,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden W^T of a tile, fp32; BITS is 0 for a dense matrix."""
    at_k = tl.arange(0, BLOCK_K)
    hidden = hidden_ptr + row.to(tl.int64)[:, None] * stride_hidden + at_k[None, :]
    scores = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    if BITS == 0:
        weight = weight_ptr + column.to(tl.int64)[None, :] * stride_weight + at_k[:, None]
        for k in range(0, hidden_size, BLOCK_K):
            if EVEN:
                a = tl.load(hidden + k, mask=row_inside[:, None], other=0.0)
                b = tl.load(weight + k, mask=column_inside[None, :], other=0.0)
            else:
                inside = at_k < hidden_size - k
                a = tl.load(hidden + k, mask=row_inside[:, None] & inside[None, :], other=0.0)
                b = tl.load(weight + k, mask=column_inside[None, :] & inside[:, None], other=0.0)
            scores = tl.dot(a, b, scores, input_precision=PRECISION)
    else:
        # A word holds EACH neighbours of a row; a block of columns lies within one group.
        EACH: tl.constexpr = 32 // BITS
        WORDS: tl.constexpr = BLOCK_K // EACH
        weight = weight_ptr + column.to(tl.int64)[:, None] * stride_weight + tl.arange(0, WORDS)[None, :]
        scales = scale_ptr + column.to(tl.int64) * stride_scale
        zeros = zero_ptr + column.to(tl.int64) * stride_scale
        shift = (tl.arange(0, EACH) * BITS)[None, None, :]
        for k in range(0, hidden_size, BLOCK_K):
            a = tl.load(hidden + k, mask=row_inside[:, None], other=0.0)
            words = tl.load(weight + k // EACH, mask=column_inside[:, None], other=0)
            q = tl.reshape((words[:, :, None] >> shift) & ((1 << BITS) - 1), [BLOCK_V, BLOCK_K])
            scale = tl.load(scales + k // GROUP, mask=column_inside, other=0.0).to(tl.float32)
            zero = tl.load(zeros + k // GROUP, mask=column_inside, other=0.0).to(tl.float32)
            b = (q.to(tl.float32) * scale[:, None] + zero[:, None]).to(a.dtype)
            scores = tl.dot(a, tl.trans(b), scores, input_precision=PRECISION)
    return scores


@triton.jit
def statistics_kernel(
    hidden_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    token_ptr,
    partial_ptr,
    picked_ptr,
    tokens,
    vocabulary,
    stride_hidden,
    stride_weight,
    stride_scale,
    hidden_size,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Log-sum-exp of each token over one block of the vocabulary, [blocks, M], and the targets' logits, [M]."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    row_inside = row < tokens
    column_inside = column < vocabulary
    raw = _tile_scores(
        hidden_ptr, weight_ptr, scale_ptr, zero_ptr, row, row_inside, column, column_inside, stride_hidden,
        stride_weight, stride_scale, hidden_size, BITS, GROUP, EVEN, BLOCK_M, BLOCK_V, BLOCK_K, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        raw += tl.load(bias_ptr + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    z, _slope = bend(raw, scale, softcap, HAS_SOFTCAP)
    token = tl.load(token_ptr + row, mask=row_inside, other=-1)
    hit = column[None, :] == token[:, None]
    # A target lies in one block alone, and that block's program writes it.
    mine = (token >= block * BLOCK_V) & (token < (block + 1) * BLOCK_V)
    tl.store(picked_ptr + row, tl.sum(tl.where(hit, z, 0.0), 1), mask=mine)
    z = tl.where(column_inside[None, :], z, float("-inf"))
    highest = tl.max(z, 1)
    partial = highest + tl.log(tl.sum(tl.exp(z - highest[:, None]), 1))
    tl.store(partial_ptr + block.to(tl.int64) * tokens + row, partial, mask=row_inside)


@triton.jit
def gradient_kernel(
    hidden_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    token_ptr,
    cotangent_ptr,
    lse_ptr,
    gradient_ptr,
    first_column,
    tokens,
    vocabulary,
    stride_hidden,
    stride_weight,
    stride_scale,
    stride_gradient,
    hidden_size,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the raw scores of the columns from `first_column` on, [M, columns of the slice]."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    column = first_column + place
    row_inside = row < tokens
    column_inside = column < vocabulary
    raw = _tile_scores(
        hidden_ptr, weight_ptr, scale_ptr, zero_ptr, row, row_inside, column, column_inside, stride_hidden,
        stride_weight, stride_scale, hidden_size, BITS, GROUP, EVEN, BLOCK_M, BLOCK_V, BLOCK_K, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        raw += tl.load(bias_ptr + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    z, slope = bend(raw, scale, softcap, HAS_SOFTCAP)
    token = tl.load(token_ptr + row, mask=row_inside, other=-1)
    factor = tl.load(cotangent_ptr + row, mask=row_inside, other=0.0).to(tl.float32) * scale
    lse = tl.load(lse_ptr + row, mask=row_inside, other=float("inf"))
    hit = tl.where(column[None, :] == token[:, None], 1.0, 0.0)
    gradient = factor[:, None] * (hit - tl.exp(z - lse[:, None])) * slope
    tl.store(
        gradient_ptr + row.to(tl.int64)[:, None] * stride_gradient + place[None, :],
        gradient.to(gradient_ptr.dtype.element_ty),
        mask=row_inside[:, None] & column_inside[None, :],
    )
