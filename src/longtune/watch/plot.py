"""Curves in characters: braille dots where the terminal has them, plain ASCII elsewhere.

A pure function of numbers and a size. What is plotted, and where on the screen, is for `screen` to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from rich.text import Text

from longtune.watch.view import number

_DOTS = np.array([(0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)], np.uint32)
"""Bits of a braille character by row and column of its dots."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*#@"
LABEL = 8
"""Characters that the labels of the vertical axis take."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps.

    Attributes:
        steps, values: [n]; NaN is a gap.
        style: rich style of its dots.
        form: `line`, `points`, or `level` (a horizontal line, not part of the range if far away).
        letter: drawn instead of dots where it is given, and in ASCII.
    """

    steps: np.ndarray
    values: np.ndarray
    style: str = ""
    form: Literal["line", "points", "level"] = "line"
    letter: str = ""


def plot(
    curves: Sequence[Curve], width: int, height: int, *, ascii_only: bool = False, log: bool = False
) -> list[Text]:
    """Draws curves over each other, the last on top, with labelled axes.

    Args:
        curves: what to draw; empty ones are passed over.
        width, height: characters in all, axes included; from 20 x 3 on it fits.
        ascii_only: no character beyond ASCII.
        log: logarithmic vertical axis; values that are not positive are left out.

    Returns:
        `height` lines of `width` characters.
    """
    columns, rows = max(width - LABEL - 1, 1), max(height - 1, 1)
    shown = [curve for curve in (_prepared(curve, log) for curve in curves) if len(curve.steps)]
    ranged = [curve for curve in shown if curve.form != "level"] or shown
    if not ranged:
        blank = [Text(" " * width) for _ in range(height)]
        blank[height // 2] = Text("nothing to plot yet".center(width)[:width], style="dim")
        return blank
    left = min(curve.steps[0] for curve in ranged)
    right = max(curve.steps[-1] for curve in ranged)
    low, high = _range(np.concatenate([curve.values for curve in ranged]), shown)
    canvas = _Canvas(columns, rows, ascii_only)
    for curve in shown:
        x = (curve.steps - left) / max(right - left, 1e-9) * (canvas.wide - 1)
        y = (high - curve.values) / (high - low) * (canvas.tall - 1)
        canvas.draw(x, y, curve)
    labelled = {round(i * (rows - 1) / max(1, rows // 4)) for i in range(rows // 4 + 1)} if rows > 1 else {0}
    lines = []
    for row in range(rows):
        value = high - (high - low) * (row / max(rows - 1, 1))
        label = _label(10**value if log else value) if row in labelled else ""
        bar = ("|" if ascii_only else "┤") if label else ("|" if ascii_only else "│")
        lines.append(Text.assemble((f"{label:>{LABEL}}{bar}", "dim"), canvas.line(row)))
    lines.append(Text(_axis(left, right, width), style="dim"))
    return lines


def sparkline(values: np.ndarray, width: int, ascii_only: bool = False) -> str:
    """The values as one line of blocks, `width` characters at most; a gap is a space."""
    if len(values) > width:
        edges = np.linspace(0, len(values), width + 1).astype(int)
        values = np.array([_mean(values[a:b]) for a, b in pairwise(edges)])
    known = values[np.isfinite(values)]
    if not len(known) or width < 1:
        return ""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, span = known.min(), known.max() - known.min()
    levels = np.full(len(values), len(blocks) // 2 - 1) if not span else (values - low) / span * (len(blocks) - 1)
    return "".join(blocks[round(float(level))] if math.isfinite(level) else " " for level in levels)


def bar(share: float, width: int, ascii_only: bool = False) -> str:
    """A bar that is filled to a share of 0 to 1."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    return full * filled + empty * (width - filled)


def _prepared(curve: Curve, log: bool) -> Curve:
    steps, values = np.asarray(curve.steps, float), np.asarray(curve.values, float)
    if log:
        values = np.log10(np.where(values > 0, values, np.nan))
    known = np.isfinite(values) & np.isfinite(steps)
    return Curve(steps[known], values[known], curve.style, curve.form, curve.letter)


def _range(values: np.ndarray, shown: Sequence[Curve]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    for curve in shown:
        # A level that is near is worth seeing whole; a far one would flatten everything else.
        if curve.form == "level" and low - (high - low) - abs(low) <= curve.values[0] <= high + (high - low) + abs(
            high
        ):
            low, high = min(low, float(curve.values[0])), max(high, float(curve.values[0]))
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        pad = abs(high) * 0.05 or 1.0
        return low - pad, high + pad
    return low, high


def _axis(left: float, right: float, width: int) -> str:
    room = width - LABEL - 1
    first, last = f"{math.floor(left):,}", f"{math.ceil(right):,}"
    middle = f"{(left + right) / 2:,.0f}"
    gap = room - len(first) - len(last)
    if gap < 1:
        return f"{last:>{width}}"[:width]
    between = middle.center(gap) if gap > len(middle) + 2 and right > left else " " * gap
    return f"{'step':>{LABEL}} {first}{between}{last}"[:width].ljust(width)


def _label(value: float) -> str:
    return next(
        (told for told in (number(value, digits) for digits in (4, 3, 2)) if len(told) <= LABEL), f"{value:.0e}"
    )


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


class _Canvas:
    """Cells of characters; each holds dots or a letter, and the style of what was drawn last."""

    def __init__(self, columns: int, rows: int, ascii_only: bool):
        self.columns, self.rows, self.ascii_only = columns, rows, ascii_only
        self.wide, self.tall = (columns, rows) if ascii_only else (columns * 2, rows * 4)
        self._bits = np.zeros((rows, columns), np.uint32)
        self._letters = np.zeros((rows, columns), np.uint32)
        self._styles = np.zeros((rows, columns), np.int64)
        self._names = [""]

    def draw(self, x: np.ndarray, y: np.ndarray, curve: Curve) -> None:
        """Draws a curve; x and y are in dots, from the upper left."""
        letter = curve.letter or {"line": "*", "points": ".", "level": "-"}[curve.form]
        if curve.form == "level":
            x = np.arange(0, self.wide, 1 if self.ascii_only else 4)
            y = np.full(len(x), y[0])
        elif curve.form == "line":
            x, y = _filled(x, y)
        across, down = np.rint(x).astype(int), np.rint(y).astype(int)
        inside = (across >= 0) & (across < self.wide) & (down >= 0) & (down < self.tall)
        across, down = across[inside], down[inside]
        column, row = (across, down) if self.ascii_only else (across // 2, down // 4)
        if self.ascii_only or curve.letter:
            self._letters[row, column] = ord(letter)
        else:
            np.bitwise_or.at(self._bits, (row, column), _DOTS[down % 4, across % 2])
        self._names.append(curve.style)
        self._styles[row, column] = len(self._names) - 1

    def line(self, row: int) -> Text:
        letters, bits, styles = self._letters[row], self._bits[row], self._styles[row]
        codes = np.where(letters > 0, letters, np.where(bits > 0, 0x2800 + bits, ord(" "))).astype("<u4")
        text = Text(codes.tobytes().decode("utf-32-le"))
        edges = [0, *(np.flatnonzero(np.diff(styles)) + 1).tolist(), len(styles)]
        for start, end in pairwise(edges):
            if name := self._names[styles[start]]:
                text.stylize(name, start, end)
        return text


def _filled(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of a line through (x, y): one in every column, and those between two columns that are far apart."""
    columns = np.arange(round(float(x[0])), round(float(x[-1])) + 1)
    heights = np.rint(np.interp(columns, x, y)).astype(int)
    steps = np.abs(np.diff(heights))
    # From each column half the way to the next is drawn in it, the rest in the next.
    counts = np.append(np.maximum(steps, 1), 1)
    owner = np.repeat(np.arange(len(columns)), counts)
    along = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    towards = np.append(np.sign(np.diff(heights)), 0)
    over = along > counts[owner] // 2
    return columns[owner] + over, heights[owner] + along * towards[owner]
