"""A Triton kernel over a block of logits: log-probs, and gradients in place.

`fused.py` says when it runs. Importing this file needs triton.

The gradient of cot * log p(token) by the raw score r of a column, with z = cap(scale * (r + bias)) and p = softmax(z):
cot * scale * (onehot - p) * (1 - tanh^2), where tanh is that of the softcap (cap(x) = c tanh(x / c)), else zero.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl


@triton.jit
def bend(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The logit of a raw score (bias included), and its derivative where the softcap bends it."""
    z = raw * scale
    slope = z * 0 + 1
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), saturated long before exp would overflow.
        bent = 1 - 2 / (1 + tl.exp(tl.minimum(2 * z / softcap, 60.0)))
        slope = 1 - bent * bent
        z = bent * softcap
    return z, slope


@triton.jit
def _rows_kernel(
    logits_ptr,
    gradient_ptr,
    bias_ptr,
    token_ptr,
    cotangent_ptr,
    log_prob_ptr,
    stride_logits,
    stride_gradient,
    vocabulary,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    NARROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: online maximum and sum over the columns, then the gradient written over the logits."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    base = logits_ptr + row * stride_logits
    own = tl.load(base + token).to(tl.float32)
    if HAS_BIAS:
        own += tl.load(bias_ptr + token).to(tl.float32)
    picked, _own_slope = bend(own, scale, softcap, HAS_SOFTCAP)
    highest = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        raw = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        z, slope = bend(raw, scale, softcap, HAS_SOFTCAP)
        z = tl.where(inside, z, float("-inf"))
        top = tl.maximum(highest, tl.max(z, 0))
        total = total * tl.exp(highest - top) + tl.sum(tl.exp(z - top), 0)
        highest = top
    lse = highest + tl.log(total)
    tl.store(log_prob_ptr + row, picked - lse)
    if HAS_GRADIENT:
        factor = tl.load(cotangent_ptr + row).to(tl.float32) * scale
        out = gradient_ptr + row * stride_gradient
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            raw = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                raw += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            z, slope = bend(raw, scale, softcap, HAS_SOFTCAP)
            probability = tl.exp(z - lse)
            gradient = factor * (tl.where(column == token, 1.0, 0.0) - probability) * slope
            if NARROWS:
                # The narrower gradient is packed into the front of its own row: what it overwrites was read in this
                # turn or an earlier one, by any thread.
                tl.debug_barrier()
            tl.store(out + column, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def log_probs_and_gradient(
    logits_CV: torch.Tensor,
    token_C: torch.Tensor,
    cotangent_C: torch.Tensor | None,
    log_prob_C: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias_V: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor | None:
    """Writes the log-probs and, where cotangents are given, turns the raw scores into their gradients in place.

    Args:
        logits_CV: raw scores h W^T, rows dense; destroyed where a gradient is asked for.
        token_C: int64. cotangent_C: fp32, or None. log_prob_C: fp32, written.
        dtype: of the gradient; as wide as the scores, or half as wide (then packed into the front of each row).

    Returns:
        The gradient [C, V] as a view of the scores' memory, or None.
    """
    rows, vocabulary = logits_CV.shape
    gradient = logits_CV
    narrows = dtype != logits_CV.dtype
    if narrows:
        gradient = logits_CV.view(dtype)[:, :vocabulary]
    if not rows:
        return gradient if cotangent_C is not None else None
    block = min(4096, triton.next_power_of_2(vocabulary))
    # Triton launches on the current device.
    with torch.cuda.device_of(logits_CV):
        _rows_kernel[(rows,)](
            logits_CV,
            gradient,
            bias_V if bias_V is not None else logits_CV,
            token_C,
            cotangent_C if cotangent_C is not None else log_prob_C,
            log_prob_C,
            logits_CV.stride(0),
            gradient.stride(0),
            vocabulary,
            scale,
            softcap or 1.0,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_GRADIENT=cotangent_C is not None,
            NARROWS=narrows,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )
    return gradient if cotangent_C is not None else None


def probe(device: torch.device) -> None:
    """Compile and run the kernel on one row; raises whatever is wrong with triton on a device."""
    logits = torch.zeros(1, 16, device=device)
    token, found = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    log_probs_and_gradient(logits, token, None, found, logits.dtype, bias_V=None, scale=1.0, softcap=None)
    if not abs(float(found) + math.log(16)) < 1e-4:
        raise RuntimeError(f"the log-prob of one of 16 equal logits was {float(found)}")
