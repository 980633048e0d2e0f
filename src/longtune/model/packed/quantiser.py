"""Packing weights: the other direction of `formats`, for every mode.

Affine follows MLX's own rule (the end of a group's range that lies farther from zero is a number of the grid, and so is
zero), with one difference: codes are chosen for scales and biases as they are stored, rounded to their dtype. The float
modes try the scales next to the one that just covers a group, and take the one with the smallest squared error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longtune.model.packed.formats import BLOCK, NVFP4_RANGE, Format, pack, scale_table, value_table

_EPS = 1e-7
"""Smallest scale of an affine group."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """The tensors of a packed weight, as `modules.PackedWeight` takes them."""

    weight: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """By the names that they have in MLX's files; words as uint32."""
        found = {f"{path}.weight": self.weight.view(torch.uint32), f"{path}.scales": self.scales}
        return found if self.biases is None else {**found, f"{path}.biases": self.biases}


def quantise(
    weight: torch.Tensor,
    format: Format,
    dtype: torch.dtype | None = None,
    global_scale: torch.Tensor | None = None,
) -> Quantised:
    """Pack a weight.

    Args:
        weight: [*, R, C], floating.
        dtype: of the scales and biases of an affine weight; the default is the weight's own.
        global_scale: fp32, for nvfp4: a scalar, or one for each matrix [*].

    Returns:
        words int32 [*, R, W], scales and biases [*, R, G].

    Raises:
        ValueError: groups don't divide a row, or there are values that are not finite.
    """
    columns = weight.shape[-1]
    groups = format.groups(columns)
    rows = weight.detach().reshape(-1, columns)
    if not bool(rows.isfinite().all()):
        raise ValueError("holds values that are not finite")
    shared = None
    if global_scale is not None:
        per_matrix = global_scale.reshape(-1).float()
        shared = per_matrix.repeat_interleave(rows.shape[0] // per_matrix.numel())
    step = max(1, BLOCK // max(columns, 1))
    words, scales, biases = [], [], []
    for start in range(0, rows.shape[0], step):
        own = slice(start, start + step)
        grouped = rows[own].float().view(-1, groups, format.group_size)
        if format.mode == "affine":
            codes, scale, bias = _affine(grouped, format.bits, dtype or weight.dtype)
            biases.append(bias)
        else:
            codes, scale = _floats(grouped, format, None if shared is None else shared[own])
        words.append(pack(codes.view(-1, columns), format.bits))
        scales.append(scale)
    leading = weight.shape[:-1]
    return Quantised(
        torch.cat(words).view(*leading, -1),
        torch.cat(scales).view(*leading, groups),
        torch.cat(biases).view(*leading, groups) if biases else None,
    )


def _affine(grouped: torch.Tensor, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [R, G, g], scales and biases [R, G] in `dtype`."""
    top = float((1 << bits) - 1)
    low, high = grouped.amin(-1), grouped.amax(-1)
    lower = low.abs() > high.abs()
    scale = ((high - low) / top).clamp_min(_EPS)
    scale = torch.where(lower, scale, -scale)
    edge = torch.where(lower, low, high)
    steps = torch.round(edge / scale)
    on_grid = steps != 0
    scale = torch.where(on_grid, edge / torch.where(on_grid, steps, 1.0), scale)
    bias = torch.where(on_grid, edge, 0.0)
    stored_scale, stored_bias = scale.to(dtype), bias.to(dtype)
    scale, bias = stored_scale.float(), stored_bias.float()
    # A scale that its dtype can't hold is zero: every number of the group is then the bias.
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = torch.round((grouped - bias[..., None]) / divisor[..., None]).clamp_(0, top)
    return codes.to(torch.uint8), stored_scale, stored_bias


def _floats(grouped: torch.Tensor, format: Format, shared: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, G, g] and scale codes uint8 [R, G] of a float mode.

    Args:
        shared: global scale of each row [R].
    """
    values = value_table(format.mode).to(grouped.device)
    steps = scale_table(format.mode).to(grouped.device)
    finite = values[values.isfinite()]
    unit = torch.ones(grouped.shape[0], 1, device=grouped.device)
    if shared is not None:
        unit = (shared / NVFP4_RANGE).reshape(-1, 1)
    largest = grouped.abs().amax(-1)
    wanted = largest / finite.max() / torch.where(unit == 0, 1.0, unit)
    # Scale codes rise with what they stand for: the last one at or below what is wanted, and its neighbours.
    usable = steps[:255] if format.mode != "nvfp4" else steps[:127]
    below = torch.searchsorted(usable, wanted.contiguous(), right=True) - 1
    best = codes = None
    chosen = torch.zeros_like(below)
    for shift in (0, 1, -1):
        code = (below + shift).clamp(0, usable.numel() - 1)
        scale = usable[code] * unit
        made = _nearest(grouped / torch.where(scale == 0, 1.0, scale)[..., None], format)
        error = ((values[made.int()] * scale[..., None]) - grouped).square().sum(-1)
        if best is None or codes is None:
            best, codes, chosen = error, made, code
            continue
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, code, chosen)
        codes = torch.where(better[..., None], made, codes)
    assert codes is not None
    return codes, chosen.to(torch.uint8)


def _nearest(x: torch.Tensor, format: Format) -> torch.Tensor:
    """The code whose value is nearest, uint8."""
    if format.bits == 8:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    half = value_table(format.mode)[:8].to(x.device)
    middles = (half[1:] + half[:-1]) / 2
    code = torch.bucketize(x.abs().contiguous(), middles)
    return (code + 8 * (x < 0)).to(torch.uint8)
