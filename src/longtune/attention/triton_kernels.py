"""Triton kernels of attention over tree paths: forward, dQ, and dK with dV, from tables of tiles; and of merging parts.

`triton_path.py` makes the tables and launches; importing this file needs triton. A query sees a key of its path if
0 <= position(query) - position(key) < window. A tile of queries lies in one span and lists the column ranges of its
path; a tile of keys lists the spans that read it. Nothing is added atomically: the same inputs give the same bits.

Shapes: q [C, H, D], k [T, K, D], v [T, K, E] (any strides but the last, which is one), lse and delta [H, C] in fp32.
Scores are kept in base 2: log2(e) is folded into the scale.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def launch(kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *args: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first tensor: Triton itself takes the current one."""
    with torch.cuda.device_of(first):
        kernel[grid](first, *args, **options)


@triton.jit
def _scores(dot, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Base-2 scores of raw products, and d(score) / d(product) in units of the scale."""
    slope = 1.0
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), saturated long before exp2 would overflow.
        raised = tl.exp2(tl.minimum(dot * (2 * LOG2E * scale / softcap), 80.0))
        bent = 1 - 2 / (1 + raised)
        slope = 1 - bent * bent
        scores = bent * (softcap * LOG2E)
    else:
        scores = dot * (scale * LOG2E)
    return scores, slope


@triton.jit
def _rows(ptr, head, rows, real, stride_row, stride_head, at, width: tl.constexpr):
    """Some rows of one head, [rows, width rounded up]; zero where a row isn't real."""
    ptrs = ptr + head * stride_head + rows[:, None] * stride_row + at[None, :]
    return tl.load(ptrs, mask=real[:, None] & (at[None, :] < width), other=0.0)


@triton.jit
def _columns(ptrs, key, stride, length, at, width: tl.constexpr, WHOLE: tl.constexpr):
    """Keys or values of a range as columns, [width rounded up, keys]; WHOLE where nothing is to be masked."""
    if WHOLE:
        return tl.load(ptrs + key[None, :] * stride)
    else:
        mask = (key[None, :] < length) & (at[:, None] < width)
        return tl.load(ptrs + key[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def _forward_blocks(
    acc,
    total,
    highest,
    q,
    k_ptrs,
    v_ptrs,
    stride_k,
    stride_v,
    query_position,
    key_position,
    start,
    stop,
    length,
    window,
    scale,
    softcap,
    width: tl.constexpr,
    value_width: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys [start, stop) of a range, whole blocks."""
    at_d = tl.arange(0, BLOCK_D)
    at_e = tl.arange(0, BLOCK_E)
    for low in range(start, stop, BLOCK_N):
        key = low + tl.arange(0, BLOCK_N)
        k = _columns(k_ptrs, key, stride_k, length, at_d, width, not (MASKED or PADDED_D))
        scores, _slope = _scores(tl.dot(q, k, input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        if MASKED:
            distance = query_position[:, None] - (key_position + key)[None, :]
            seen = (distance >= 0) & (key[None, :] < length)
            if HAS_WINDOW:
                seen = seen & (distance < window)
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        if MASKED:
            # A row that has seen no key yet has no maximum to subtract.
            shift = tl.where(top == float("-inf"), 0.0, top)
        else:
            shift = top
        weights = tl.exp2(scores - shift[:, None])
        factor = tl.exp2(highest - shift)
        total = total * factor + tl.sum(weights, 1)
        acc = acc * factor[:, None]
        if MASKED or PADDED_E:
            v = tl.load(
                v_ptrs + key[:, None] * stride_v,
                mask=(key[:, None] < length) & (at_e[None, :] < value_width),
                other=0.0,
            )
        else:
            v = tl.load(v_ptrs + key[:, None] * stride_v)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        highest = top
    return acc, total, highest


@triton.jit
def _edges(first, last, key_position, length, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a range of keys, for queries at positions first..last: begin and end of what some query sees, and of the whole
    blocks in between that every query sees entirely; all counted in keys from the start of the range."""
    end = tl.minimum(length, last + 1 - key_position)
    whole_to = tl.maximum(0, tl.minimum(length, first + 1 - key_position)) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        begin = tl.maximum(0, first - window + 1 - key_position) // BLOCK_N * BLOCK_N
        whole_from = (tl.maximum(0, last - window + 1 - key_position) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    else:
        begin = 0
        whole_from = 0
    return begin, whole_from, tl.maximum(whole_to, whole_from), end


@triton.jit(do_not_specialize=["stride_lh"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    tile_ptr,
    range_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_lh,
    groups,
    width: tl.constexpr,
    value_width: tl.constexpr,
    window,
    scale,
    softcap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries, one head: out and the natural log-sum-exp."""
    tile = tile_ptr + tl.program_id(0) * 5
    head = tl.program_id(1)
    query = tl.load(tile)
    count = tl.load(tile + 1)
    position = tl.load(tile + 2)
    first_range = tl.load(tile + 3)
    last_range = tl.load(tile + 4)
    at_m = tl.arange(0, BLOCK_M)
    at_d = tl.arange(0, BLOCK_D)
    at_e = tl.arange(0, BLOCK_E)
    rows = query + at_m
    real = at_m < count
    q = _rows(q_ptr, head, rows, real, stride_qt, stride_qh, at_d, width)
    query_position = position + at_m
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    key_head = head // groups
    for index in range(first_range, last_range):
        column = tl.load(range_ptr + index * 3).to(tl.int64)
        length = tl.load(range_ptr + index * 3 + 1)
        key_position = tl.load(range_ptr + index * 3 + 2)
        k_ptrs = k_ptr + column * stride_kt + key_head * stride_kh + at_d[:, None]
        v_ptrs = v_ptr + column * stride_vt + key_head * stride_vh + at_e[None, :]
        begin, whole_from, whole_to, end = _edges(
            position, position + count - 1, key_position, length, window, HAS_WINDOW, BLOCK_N
        )
        # What the window cuts, what every query sees, what the diagonal cuts.
        for piece in tl.static_range(0 if HAS_WINDOW else 1, 3):  # pyright: ignore
            if piece == 0:
                start, stop = begin, tl.minimum(whole_from, end)
            elif piece == 1:
                start, stop = whole_from, whole_to
            else:
                start, stop = whole_to, end
            acc, total, highest = _forward_blocks(
                acc, total, highest, q, k_ptrs, v_ptrs, stride_kt, stride_vt, query_position, key_position,
                start, stop, length, window, scale, softcap, width, value_width,
                piece != 1, HAS_WINDOW, HAS_SOFTCAP, PADDED_D, PADDED_E, BLOCK_N, BLOCK_D, BLOCK_E, PRECISION,
            )  # fmt: skip
    # Rows beyond the tile may have seen nothing.
    total = tl.where(total == 0, 1.0, total)
    out = acc / total[:, None]
    lse = (highest + tl.log2(total)) / LOG2E
    tl.store(
        out_ptr + head * stride_oh + rows[:, None] * stride_ot + at_e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (at_e[None, :] < value_width),
    )
    tl.store(lse_ptr + head * stride_lh + rows, lse, mask=real)


@triton.jit(do_not_specialize=["stride_lh", "count"])
def delta_kernel(
    dout_ptr,
    out_ptr,
    delta_ptr,
    stride_dt,
    stride_dh,
    stride_ot,
    stride_oh,
    stride_lh,
    count,
    value_width: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """delta = sum of dout * out over the value width, one head."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    at_e = tl.arange(0, BLOCK_E)
    mask = (rows[:, None] < count) & (at_e[None, :] < value_width)
    dout = tl.load(dout_ptr + head * stride_dh + rows[:, None] * stride_dt + at_e[None, :], mask=mask, other=0.0)
    out = tl.load(out_ptr + head * stride_oh + rows[:, None] * stride_ot + at_e[None, :], mask=mask, other=0.0)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * stride_lh + rows, delta, mask=rows < count)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    made_ptr,
    total_ptr,
    rows,
    heads,
    stride_oh,
    stride_ot,
    stride_oe,
    stride_lh,
    stride_lt,
    stride_ph,
    stride_pt,
    stride_pe,
    stride_qh,
    stride_qt,
    stride_mh,
    stride_mt,
    stride_me,
    stride_th,
    stride_tt,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Output and log-sum-exp over two parts; a row is one head of one token. `made` may be `out`."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    token, head = (row // heads).to(tl.int64), row % heads
    at = tl.arange(0, BLOCK_E)[None, :]
    one = tl.load(lse_ptr + head * stride_lh + token * stride_lt, mask=real, other=0.0)
    other = tl.load(part_lse_ptr + head * stride_qh + token * stride_qt, mask=real, other=0.0)
    highest = tl.maximum(one, other)
    total = highest + tl.log(tl.exp(one - highest) + tl.exp(other - highest))
    tl.store(total_ptr + head * stride_th + token * stride_tt, total, mask=real)
    mask = real[:, None] & (at < WIDTH)
    token, head = token[:, None], head[:, None]
    out = tl.load(out_ptr + head * stride_oh + token * stride_ot + at * stride_oe, mask=mask, other=0.0)
    part = tl.load(part_ptr + head * stride_ph + token * stride_pt + at * stride_pe, mask=mask, other=0.0)
    made = out.to(tl.float32) * tl.exp(one - total)[:, None] + part.to(tl.float32) * tl.exp(other - total)[:, None]
    to = made_ptr + head * stride_mh + token * stride_mt + at * stride_me
    tl.store(to, made.to(made_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dq_blocks(
    dq,
    q,
    dout,
    lse,
    delta,
    k_ptrs,
    v_ptrs,
    stride_k,
    stride_v,
    query_position,
    key_position,
    start,
    stop,
    length,
    window,
    scale,
    softcap,
    width: tl.constexpr,
    value_width: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    at_d = tl.arange(0, BLOCK_D)
    at_e = tl.arange(0, BLOCK_E)
    for low in range(start, stop, BLOCK_N):
        key = low + tl.arange(0, BLOCK_N)
        k = _columns(k_ptrs, key, stride_k, length, at_d, width, not (MASKED or PADDED_D))
        v = _columns(v_ptrs, key, stride_v, length, at_e, value_width, not (MASKED or PADDED_E))
        scores, slope = _scores(tl.dot(q, k, input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            distance = query_position[:, None] - (key_position + key)[None, :]
            seen = (distance >= 0) & (key[None, :] < length)
            if HAS_WINDOW:
                seen = seen & (distance < window)
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(dout, v, input_precision=PRECISION)
        dscores = weights * (dweights - delta[:, None])
        if HAS_SOFTCAP:
            dscores = dscores * slope
        dq = tl.dot(dscores.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["stride_lh"])
def dq_kernel(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    tile_ptr,
    range_ptr,
    stride_dt,
    stride_dh,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_gt,
    stride_gh,
    stride_lh,
    groups,
    width: tl.constexpr,
    value_width: tl.constexpr,
    window,
    scale,
    softcap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries, one head: dQ."""
    tile = tile_ptr + tl.program_id(0) * 5
    head = tl.program_id(1)
    query = tl.load(tile)
    count = tl.load(tile + 1)
    position = tl.load(tile + 2)
    first_range = tl.load(tile + 3)
    last_range = tl.load(tile + 4)
    at_m = tl.arange(0, BLOCK_M)
    at_d = tl.arange(0, BLOCK_D)
    at_e = tl.arange(0, BLOCK_E)
    rows = query + at_m
    real = at_m < count
    q = _rows(q_ptr, head, rows, real, stride_qt, stride_qh, at_d, width)
    dout = _rows(dout_ptr, head, rows, real, stride_dt, stride_dh, at_e, value_width)
    # Rows beyond the tile: no weight at all.
    lse = tl.load(lse_ptr + head * stride_lh + rows, mask=real, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + head * stride_lh + rows, mask=real, other=0.0)
    query_position = position + at_m
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    key_head = head // groups
    for index in range(first_range, last_range):
        column = tl.load(range_ptr + index * 3).to(tl.int64)
        length = tl.load(range_ptr + index * 3 + 1)
        key_position = tl.load(range_ptr + index * 3 + 2)
        k_ptrs = k_ptr + column * stride_kt + key_head * stride_kh + at_d[:, None]
        v_ptrs = v_ptr + column * stride_vt + key_head * stride_vh + at_e[:, None]
        begin, whole_from, whole_to, end = _edges(
            position, position + count - 1, key_position, length, window, HAS_WINDOW, BLOCK_N
        )
        # What the window cuts, what every query sees, what the diagonal cuts.
        for piece in tl.static_range(0 if HAS_WINDOW else 1, 3):  # pyright: ignore
            if piece == 0:
                start, stop = begin, tl.minimum(whole_from, end)
            elif piece == 1:
                start, stop = whole_from, whole_to
            else:
                start, stop = whole_to, end
            dq = _dq_blocks(
                dq, q, dout, lse, delta, k_ptrs, v_ptrs, stride_kt, stride_vt, query_position, key_position,
                start, stop, length, window, scale, softcap, width, value_width,
                piece != 1, HAS_WINDOW, HAS_SOFTCAP, PADDED_D, PADDED_E, BLOCK_N, BLOCK_D, BLOCK_E, PRECISION,
            )  # fmt: skip
    tl.store(
        dq_ptr + head * stride_gh + rows[:, None] * stride_gt + at_d[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=real[:, None] & (at_d[None, :] < width),
    )


@triton.jit(do_not_specialize=["stride_lh"])
def dkv_kernel(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tile_ptr,
    reader_ptr,
    stride_dt,
    stride_dh,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_gkt,
    stride_gkh,
    stride_gvt,
    stride_gvh,
    stride_lh,
    groups,
    width: tl.constexpr,
    value_width: tl.constexpr,
    window,
    scale,
    softcap,
    ADDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of keys, one key head: written or added to the fp32 accumulators, all readers and all query heads in
    order."""
    tile = tile_ptr + tl.program_id(0) * 5
    key_head = tl.program_id(1)
    column = tl.load(tile).to(tl.int64)
    count = tl.load(tile + 1)
    position = tl.load(tile + 2)
    first_reader = tl.load(tile + 3)
    last_reader = tl.load(tile + 4)
    at_n = tl.arange(0, BLOCK_N)
    at_d = tl.arange(0, BLOCK_D)
    at_e = tl.arange(0, BLOCK_E)
    real = at_n < count
    mask_k = real[:, None] & (at_d[None, :] < width)
    mask_v = real[:, None] & (at_e[None, :] < value_width)
    rows = column + at_n
    k = _rows(k_ptr, key_head, rows, real, stride_kt, stride_kh, at_d, width)
    v = _rows(v_ptr, key_head, rows, real, stride_vt, stride_vh, at_e, value_width)
    key_position = position + at_n
    last = position + count - 1
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], dtype=tl.float32)
    at_m = tl.arange(0, BLOCK_M)
    for index in range(first_reader, last_reader):
        start = tl.load(reader_ptr + index * 3)
        length = tl.load(reader_ptr + index * 3 + 1)
        query_position = tl.load(reader_ptr + index * 3 + 2)
        # Queries before `begin` or from `end` on see no key of the tile.
        begin = tl.maximum(0, position - query_position) // BLOCK_M * BLOCK_M
        end = length
        if HAS_WINDOW:
            end = tl.minimum(length, last + window - query_position)
        steps = tl.maximum(0, end - begin + BLOCK_M - 1) // BLOCK_M
        # One loop over the query heads of the key head and their blocks keeps the pipeline full between heads.
        for step in range(0, groups * steps):
            head = key_head * groups + step // steps
            query = begin + (step % steps) * BLOCK_M + at_m
            inside = query < length
            row = start + query
            q = _rows(q_ptr, head, row, inside, stride_qt, stride_qh, at_d, width)
            dout = _rows(dout_ptr, head, row, inside, stride_dt, stride_dh, at_e, value_width)
            lse = tl.load(lse_ptr + head * stride_lh + row, mask=inside, other=float("inf")) * LOG2E
            delta = tl.load(delta_ptr + head * stride_lh + row, mask=inside, other=0.0)
            scores, slope = _scores(tl.dot(k, tl.trans(q), input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
            distance = (query_position + query)[None, :] - key_position[:, None]
            seen = distance >= 0
            if HAS_WINDOW:
                seen = seen & (distance < window)
            weights = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dweights = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            dscores = weights * (dweights - delta[None, :])
            if HAS_SOFTCAP:
                dscores = dscores * slope
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    dk_ptrs = dk_ptr + key_head * stride_gkh + rows[:, None] * stride_gkt + at_d[None, :]
    dv_ptrs = dv_ptr + key_head * stride_gvh + rows[:, None] * stride_gvt + at_e[None, :]
    dk = dk * scale
    if ADDS:
        dk += tl.load(dk_ptrs, mask=mask_k, other=0.0)
        dv += tl.load(dv_ptrs, mask=mask_v, other=0.0)
    tl.store(dk_ptrs, dk, mask=mask_k)
    tl.store(dv_ptrs, dv, mask=mask_v)
