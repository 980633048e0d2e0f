"""Choosing a width for each unit: the low one, and the high one where a bit more is worth most.

Pure numbers. A unit's gain is what its KL falls by between the two widths; units are raised in the order of gain per
byte that it takes, as long as the whole stays within the wanted bits per weight.
"""

from __future__ import annotations

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
    low: Format,
    high: Format,
    target: float,
    kl: Mapping[str, Mapping[int, float]],
    plain: Plain,
    scale_bits: int,
) -> Widths:
    """The widths with the least summed KL that a greedy choice finds within `target` bits per weight.

    Args:
        kl: measured KL by unit and width: that of the low width is needed, that of the high one counts as zero where
            it was not measured.

    Raises:
        UserError: a unit without a figure, or a target below what the low width takes.
    """
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
    formats = {unit.name: low for unit in units}
    numbers = plain.numbers + sum(unit.numbers for unit in units)
    lowest = _bits_per_weight(units, formats, plain, scale_bits)
    if target < lowest:
        raise UserError(
            Problem(
                f"--target-bpw {target:g}",
                f"at {low.bits} bits everywhere the model takes {lowest:.3f} bits per weight, scales included",
                f"use at least {lowest:.2f}, or fewer --bits",
            )
        )
    left = target * numbers - lowest * numbers
    extra = {unit.name: packed_bits(unit, high, scale_bits) - packed_bits(unit, low, scale_bits) for unit in units}
    gain = {
        name: figures[low.bits] - figures.get(high.bits, 0.0) for name, figures in kl.items() if low.bits in figures
    }
    for unit in sorted(units, key=lambda unit: gain[unit.name] / max(extra[unit.name], 1), reverse=True):
        if extra[unit.name] <= left and gain[unit.name] > 0:
            formats[unit.name] = high
            left -= extra[unit.name]
    notes = []
    if all(format is high for format in formats.values()):
        notes.append(f"every module fits at {high.bits} bits within {target:g} bits per weight")
    return Widths(formats, _bits_per_weight(units, formats, plain, scale_bits), tuple(notes))


def plain_part(tensors: Sequence[torch.Tensor]) -> Plain:
    """The size of tensors that stay as they are."""
    return Plain(
        sum(tensor.numel() for tensor in tensors), sum(8 * tensor.numel() * tensor.itemsize for tensor in tensors)
    )


def _bits_per_weight(units: Sequence[Unit], formats: Mapping[str, Format], plain: Plain, scale_bits: int) -> float:
    bits = plain.bits + sum(packed_bits(unit, formats[unit.name], scale_bits) for unit in units)
    return bits / max(plain.numbers + sum(unit.numbers for unit in units), 1)
