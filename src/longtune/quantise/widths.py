"""Choosing a width for each unit: the low one, and a higher one where a bit more is worth most.

Pure numbers. A step raises one unit by one width; steps are taken in the order of the KL that they save for the bits
that they cost, as long as the whole stays within the wanted bits per weight. A figure that was not measured is
estimated from the low width's: each bit halves the rounding error, and KL is quadratic in it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from longtune.errors import Problem, UserError
from longtune.model.packed.formats import Format
from longtune.quantise.units import Unit


@dataclass(frozen=True, slots=True)
class Widths:
    """A format for every unit.

    Attributes:
        formats: by the unit's name.
        bits_per_weight: bits of the whole model, scales and plain tensors included, by its number of weights.
        notes: what the user should know.
    """

    formats: Mapping[str, Format]
    bits_per_weight: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plain:
    """What stays as it is: how many numbers, and how many bits they take."""

    numbers: int
    bits: int


def packed_bits(unit: Unit, format: Format, scale_bits: int) -> int:
    """Bits of a unit's packed words, scales and biases.

    Args:
        scale_bits: of one scale (that of an affine format is stored in the weight's dtype).
    """
    columns = unit.shape[-1]
    rows = unit.numbers // columns
    per_group = 2 * scale_bits if format.mode == "affine" else 8
    return rows * (32 * format.words(columns) + per_group * format.groups(columns))


def uniform_widths(units: Sequence[Unit], format: Format, plain: Plain, scale_bits: int) -> Widths:
    """The same format for all."""
    formats = {unit.name: format for unit in units}
    return Widths(formats, _bits_per_weight(units, formats, plain, scale_bits))


def choose_widths(
    units: Sequence[Unit],
    formats: Sequence[Format],
    target: float,
    kl: Mapping[str, Mapping[int, float]],
    plain: Plain,
    scale_bits: int,
) -> Widths:
    """The widths with the least summed KL that a greedy choice finds within `target` bits per weight.

    Args:
        formats: the low width first, then the higher ones in order.
        kl: measured KL by unit and width; that of the low width is needed.

    Raises:
        UserError: a unit without a figure, or a target below what the low width takes.
    """
    low = formats[0]
    lacking = [unit.name for unit in units if low.bits not in kl.get(unit.name, {})]
    if lacking:
        shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
        raise UserError(
            Problem(
                "sensitivities",
                f"no figure at {low.bits} bits for {shown}",
                f"measure them: longtune sensitivity MODEL --data DATA --bits {low.bits}",
            )
        )
    chosen = {unit.name: low for unit in units}
    numbers = plain.numbers + sum(unit.numbers for unit in units)
    lowest = _bits_per_weight(units, chosen, plain, scale_bits)
    if target < lowest:
        raise UserError(
            Problem(
                f"--target-bpw {target:g}",
                f"at {low.bits} bits everywhere the model takes {lowest:.3f} bits per weight, scales included",
                f"use at least {math.ceil(lowest * 100) / 100:g}, or fewer --bits",
            )
        )
    left = (target - lowest) * numbers
    steps = [
        (-worth, index, 0) for index, unit in enumerate(units) if (worth := _worth(unit, formats, 0, kl, scale_bits))
    ]
    heapq.heapify(steps)
    while steps:
        _, index, at = heapq.heappop(steps)
        unit = units[index]
        cost = packed_bits(unit, formats[at + 1], scale_bits) - packed_bits(unit, formats[at], scale_bits)
        if cost > left:
            continue  # Smaller units may still fit.
        left -= cost
        chosen[unit.name] = formats[at + 1]
        if at + 2 < len(formats) and (worth := _worth(unit, formats, at + 1, kl, scale_bits)):
            heapq.heappush(steps, (-worth, index, at + 1))
    notes = []
    if all(format is formats[-1] for format in chosen.values()):
        notes.append(f"every module fits at {formats[-1].bits} bits within {target:g} bits per weight")
    return Widths(chosen, _bits_per_weight(units, chosen, plain, scale_bits), tuple(notes))


def _worth(
    unit: Unit, formats: Sequence[Format], at: int, kl: Mapping[str, Mapping[int, float]], scale_bits: int
) -> float:
    """KL saved for each bit that the step from one format to the next costs; 0 where none is saved."""
    figures, low = kl[unit.name], formats[0].bits

    def divergence(bits: int) -> float:
        return figures.get(bits, figures[low] * 4.0 ** (low - bits))

    saved = divergence(formats[at].bits) - divergence(formats[at + 1].bits)
    cost = packed_bits(unit, formats[at + 1], scale_bits) - packed_bits(unit, formats[at], scale_bits)
    return max(saved, 0.0) / max(cost, 1)


def plain_part(tensors: Sequence[torch.Tensor]) -> Plain:
    """The size of tensors that stay as they are."""
    return Plain(
        sum(tensor.numel() for tensor in tensors), sum(8 * tensor.numel() * tensor.itemsize for tensor in tensors)
    )


def _bits_per_weight(units: Sequence[Unit], formats: Mapping[str, Format], plain: Plain, scale_bits: int) -> float:
    bits = plain.bits + sum(packed_bits(unit, formats[unit.name], scale_bits) for unit in units)
    return bits / max(plain.numbers + sum(unit.numbers for unit in units), 1)
