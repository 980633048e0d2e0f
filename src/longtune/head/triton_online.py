"""Triton kernels between the products of the online head: one slice of the vocabulary's logits, and the last step.

`online.py` says what is computed and when. A program takes one token. What a token carries from slice to slice is a
reference (a logit near the largest of the columns that are not its target), the sum of exp(z - reference) over those
columns, and the target's own logit, all fp32.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from longtune.head.triton_logits import bend

SLACK = tl.constexpr(8.0)
"""How far a logit may lie above its token's reference before what was summed is scaled down to a new one. exp of it
must be far from the largest fp16."""


@triton.jit
def slice_kernel(
    logits_ptr,
    weights_ptr,
    bias_ptr,
    token_ptr,
    reference_ptr,
    total_ptr,
    picked_ptr,
    sums_ptr,
    stride_logits,
    stride_weights,
    stride_part,
    first,
    columns,
    hidden_size,
    scale,
    softcap,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Columns `first` and on of one token: exp(z - reference) times the softcap's slope, written over the raw scores
    (in the model's dtype, zero at the target), and what the token carries brought up to date.

    Where the reference is raised, the sums of those weights times the matrix, [PARTS, tokens, H], are scaled down.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    place = tl.arange(0, BLOCK)
    column = first + place
    inside = place < columns
    raw = tl.load(logits_ptr + row * stride_logits + place, mask=inside, other=0.0)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    z, slope = bend(raw, scale, softcap, HAS_SOFTCAP)
    own = column == token
    if (token >= first) & (token < first + columns):
        tl.store(picked_ptr + row, tl.sum(tl.where(own, z, 0.0), 0))
    z = tl.where(inside & (column != token), z, float("-inf"))
    top = tl.max(z, 0)
    if FIRST:
        before = top
        total = 0.0
    else:
        before = tl.load(reference_ptr + row)
        total = tl.load(total_ptr + row)
    reference = tl.where(top > before + SLACK, top, before)  # pyright: ignore[reportOperatorIssue]
    # A token whose every column so far was its target has no reference, and no sums.
    shift = tl.where(reference == float("-inf"), 0.0, reference)
    weight = tl.exp(z - shift)
    lower = tl.exp(before - shift)
    tl.store(total_ptr + row, total * lower + tl.sum(weight, 0))
    tl.store(reference_ptr + row, reference)
    if HAS_GRADIENT:
        # The weights may be narrower than the scores, and then lie at the front of their own row: everything there has
        # been read by any thread.
        tl.debug_barrier()
        if HAS_SOFTCAP:
            weight = weight * slope
        tl.store(weights_ptr + row * stride_weights + place, weight.to(weights_ptr.dtype.element_ty), mask=inside)
        if not FIRST:
            if reference > before:
                for part in range(PARTS):
                    at = sums_ptr + part * stride_part + row * hidden_size
                    for start in range(0, hidden_size, BLOCK_H):
                        here = start + tl.arange(0, BLOCK_H)
                        sums = tl.load(at + here, mask=here < hidden_size, other=0.0)
                        tl.store(at + here, sums * lower, mask=here < hidden_size)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1]; 1 + x alone would lose a small x."""
    return tl.where(x < 1e-3, x - x * x * (0.5 - x / 3), tl.log(1 + x))


@triton.jit
def finish_kernel(
    sums_ptr,
    rows_ptr,
    cotangent_ptr,
    token_ptr,
    reference_ptr,
    total_ptr,
    picked_ptr,
    log_prob_ptr,
    out_ptr,
    stride_part,
    stride_rows,
    hidden_size,
    scale,
    softcap,
    PARTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The log-prob of one token, and its d(hidden) from the sums and the target's row of the matrix.

    `rows_ptr` is the matrix itself (BY_TOKEN), or the targets' rows one after another.
    """
    row = tl.program_id(0).to(tl.int64)
    reference = tl.load(reference_ptr + row)
    picked = tl.load(picked_ptr + row)
    # log of the other columns' odds against the target: everything follows from it without cancellation.
    total = tl.load(total_ptr + row)
    odds = reference + tl.log(tl.where(total == 0, 1.0, total)) - picked
    small = tl.exp(-tl.abs(odds))
    log_prob = -(tl.maximum(odds, 0.0) + _log1p(small))
    tl.store(log_prob_ptr + row, log_prob)
    if HAS_GRADIENT:
        rest = tl.where(odds > 0, 1.0, small) / (1 + small)
        factor = tl.load(cotangent_ptr + row).to(tl.float32) * scale
        slope = 1.0
        if HAS_SOFTCAP:
            slope = 1 - (picked / softcap) * (picked / softcap)
        # exp(reference - lse), where lse = picked - log_prob.
        share = tl.exp(tl.where(reference == float("-inf"), reference, reference - picked + log_prob))
        if BY_TOKEN:
            own = rows_ptr + tl.load(token_ptr + row) * stride_rows
        else:
            own = rows_ptr + row * stride_rows
        for start in range(0, hidden_size, BLOCK_H):
            here = start + tl.arange(0, BLOCK_H)
            inside = here < hidden_size
            sums = tl.load(sums_ptr + row * hidden_size + here, mask=inside, other=0.0)
            for part in range(1, PARTS):
                at = sums_ptr + part * stride_part + row * hidden_size
                sums += tl.load(at + here, mask=inside, other=0.0)
            target = tl.load(own + here, mask=inside, other=0.0).to(tl.float32)
            gradient = factor * (rest * slope * target - share * sums)
            tl.store(out_ptr + row * hidden_size + here, gradient.to(out_ptr.dtype.element_ty), mask=inside)
