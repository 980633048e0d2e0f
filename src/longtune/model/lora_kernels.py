"""Triton kernels for the skinny products of a LoRA linear with a wide output, where memory is the limit.

Shapes: N tokens, O outputs, R the rank. `expand` writes low B^T faster than a library's product of such a
shape; `up_gradients` reads d(output) once for both gradients that are made of it. The figures are in docs/kernels.md.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_EXPAND_ROWS, _EXPAND_COLUMNS = 64, 256
_ROWS, _COLUMNS, _PARTS = 32, 256, 8
"""Tile of d(output), and the parts of the tokens that are summed apart. Chosen by measurement on an H200."""


@triton.jit(do_not_specialize=["N"])
def expand_kernel(
    low_ptr, up_ptr, y_ptr, N, O, R, stride_low, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr
):
    """One tile of y [N, O] = low [N, R] up [O, R]^T."""
    at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_r = tl.arange(0, BLOCK_R)
    real = at_r[None, :] < R
    low = tl.load(low_ptr + at_n[:, None] * stride_low + at_r[None, :], mask=(at_n[:, None] < N) & real, other=0.0)
    up = tl.load(up_ptr + at_o[:, None] * R + at_r[None, :], mask=(at_o[:, None] < O) & real, other=0.0)
    y = tl.dot(low, tl.trans(up), input_precision="ieee")
    inside = (at_n[:, None] < N) & (at_o[None, :] < O)
    tl.store(y_ptr + at_n[:, None].to(tl.int64) * O + at_o[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "part"])
def up_gradients_kernel(
    dy_ptr,
    up_ptr,
    low_ptr,
    dlow_ptr,
    dup_ptr,
    N,
    O,
    R,
    stride_low,
    part,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Some columns of dy [N, O] for `part` tokens: their share of dy up (fp32 [O / BLOCK_O, N, R]), and these tokens'
    share of dy^T low (fp32 [parts, O, R])."""
    column, share = tl.program_id(0), tl.program_id(1)
    at_n = tl.arange(0, BLOCK_N)
    at_o = column * BLOCK_O + tl.arange(0, BLOCK_O)
    at_r = tl.arange(0, BLOCK_R)
    real = at_r[None, :] < R
    wide = at_o < O
    up = tl.load(up_ptr + at_o[:, None] * R + at_r[None, :], mask=wide[:, None] & real, other=0.0)
    dup = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
    first = share * part
    last = tl.minimum(N, first + part)
    for start in range(first, last, BLOCK_N):
        row = start + at_n
        inside = row < last
        mask = inside[:, None] & wide[None, :]
        dy = tl.load(dy_ptr + row[:, None].to(tl.int64) * O + at_o[None, :], mask=mask, other=0.0)
        low = tl.load(low_ptr + row[:, None] * stride_low + at_r[None, :], mask=inside[:, None] & real, other=0.0)
        dlow = tl.dot(dy, up, input_precision="ieee")
        to = dlow_ptr + (column.to(tl.int64) * N + row[:, None]) * R + at_r[None, :]
        tl.store(to, dlow, mask=inside[:, None] & real)
        dup = tl.dot(tl.trans(dy), low, dup, input_precision="ieee")
    to = dup_ptr + (share.to(tl.int64) * O + at_o[:, None]) * R + at_r[None, :]
    tl.store(to, dup, mask=wide[:, None] & real)


def _block_of(rank: int) -> int:
    """The rank as tiles hold it, padded in registers: products take 16 columns at least."""
    return max(16, triton.next_power_of_2(rank))


def expand(low_NR: torch.Tensor, up_OR: torch.Tensor) -> torch.Tensor:
    """low B^T [N, O] in their dtype; the last axis of `low` is dense, B is contiguous."""
    (N, R), O = low_NR.shape, up_OR.shape[0]
    y_NO = torch.empty(N, O, dtype=low_NR.dtype, device=low_NR.device)
    grid = (triton.cdiv(O, _EXPAND_COLUMNS), triton.cdiv(N, _EXPAND_ROWS))
    with torch.cuda.device_of(low_NR):
        expand_kernel[grid](
            low_NR, up_OR, y_NO, N, O, R, low_NR.stride(0), _EXPAND_ROWS, _EXPAND_COLUMNS, _block_of(R), num_warps=4
        )
    return y_NO


def up_gradients(dy_NO: torch.Tensor, up_OR: torch.Tensor, low_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dy B [N, R] and dy^T low [O, R], fp32; dy and B are contiguous, the last axis of `low` is dense.

    Takes R / 128 of the bytes of a bf16 dy beside its results.
    """
    (N, O), R = dy_NO.shape, up_OR.shape[1]
    columns = triton.cdiv(O, _COLUMNS)
    dlow = torch.empty(columns, N, R, dtype=torch.float32, device=dy_NO.device)
    dup = torch.empty(_PARTS, O, R, dtype=torch.float32, device=dy_NO.device)
    part = triton.cdiv(triton.cdiv(N, _PARTS), _ROWS) * _ROWS
    with torch.cuda.device_of(dy_NO):
        up_gradients_kernel[columns, _PARTS](
            dy_NO,
            up_OR,
            low_NR,
            dlow,
            dup,
            N,
            O,
            R,
            low_NR.stride(0),
            part,
            _ROWS,
            _COLUMNS,
            _block_of(R),
            num_warps=4,
            num_stages=3,
        )
    return dlow.sum(0), dup.sum(0)


def probe(device: torch.device) -> None:
    """Compile and run the smaller kernel; raises whatever is wrong with triton on a device."""
    ones = torch.ones(16, 16, device=device)
    if not bool((expand(ones, ones) == 16).all()):
        raise RuntimeError("a sum of 16 ones was not 16")
