"""Curves as SVG: for the report, which must be readable without a script. A pure function of numbers.

Colours are classes; the page around it says what they look like by day and by night.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longtune.watch.series import Buckets, smooth

_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 10, 8, 24


@dataclass(frozen=True, slots=True)
class Line:
    """One curve.

    Attributes:
        label: what it is called.
        buckets: its values.
        colour: number of its class, c0 and on.
        points: drawn as points (seldom measured) and not smoothed.
        weight: of the past in smoothing; 0 for none.
    """

    label: str
    buckets: Buckets
    colour: int = 0
    points: bool = False
    weight: float = 0.0


def chart(
    title: str,
    lines: Sequence[Line],
    told: Callable[[float], str],
    *,
    width: int = 520,
    height: int = 230,
    unit: float = 1.0,
    level: tuple[str, float] | None = None,
) -> str:
    """A figure with a title, a legend and axes; empty where there is nothing to draw.

    Args:
        told: a value as text, for the vertical axis.
        unit: what round numbers on the vertical axis are multiples of.
        level: (name, value) of a horizontal line.
    """
    lines = [line for line in lines if np.isfinite(line.buckets.mean).any()]
    if not lines:
        return ""
    steps = np.concatenate([line.buckets.step for line in lines])
    values = np.concatenate([line.buckets.mean for line in lines])
    known = values[np.isfinite(values)]
    low, high = float(known.min()), float(known.max())
    if level is not None and low - (high - low) - abs(low) < level[1] < high + (high - low) + abs(high):
        low, high = min(low, level[1]), max(high, level[1])
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - pad, high + pad
    left, right = float(steps.min()), float(steps.max())
    if left == right:
        left, right = left - 0.5, right + 0.5
    inner_width, inner_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def x(step: np.ndarray | float) -> np.ndarray | float:
        return _LEFT + (step - left) / (right - left) * inner_width

    def y(value: np.ndarray | float) -> np.ndarray | float:
        return _TOP + (high - value) / (high - low) * inner_height

    parts = []
    for value in (unit * round_number for round_number in ticks(low / unit, high / unit, inner_height / 40)):
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at}" text-anchor="end" dy=".35em">{html.escape(told(value))}</text>')
    for step in ticks(left, right, inner_width / 80):
        if step == int(step):
            parts.append(f'<text x="{x(step):.1f}" y="{height - 8}" text-anchor="middle">{int(step):,}</text>')
    legend = []
    for line in lines:
        parts += _curve(line, x, y)
        newest = next(value for value in reversed(line.buckets.mean.tolist()) if math.isfinite(value))
        legend.append(
            f'<span><i class="c{line.colour}"></i>{html.escape(f"{line.label} {told(newest)}".strip())}</span>'
        )
    if level is not None and low < level[1] < high:
        at = f"{y(level[1]):.1f}"
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at}" y2="{at}"/>')
        legend.append(f'<span><i class="c4"></i>{html.escape(f"{level[0]} {told(level[1])}")}</span>')
    name = html.escape(title)
    return (
        f"<figure><figcaption><b>{name}</b>{''.join(legend)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{"".join(parts)}</svg></figure>'
    )


def ticks(low: float, high: float, count: float) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    raw = (high - low) / max(2.0, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw)
    return [float(f"{n * step:.12g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _curve(line: Line, x: Callable, y: Callable) -> list[str]:
    buckets, colour = line.buckets, line.colour
    if line.points:
        known = np.isfinite(buckets.mean)
        marks = [
            f'<circle class="c{colour}" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>'
            for a, b in zip(x(buckets.step[known]).tolist(), y(buckets.mean[known]).tolist(), strict=True)
        ]
        return [_path(x(buckets.step), y(buckets.mean), f"thin c{colour}"), *marks]
    drawn = []
    if not np.array_equal(buckets.low, buckets.high, equal_nan=True):
        low, high = np.clip(y(buckets.low), _TOP, None), np.clip(y(buckets.high), _TOP, None)
        band = "".join(
            f"M{a:.1f} {min(t, b - 1):.1f}V{b:.1f}"
            for a, b, t in zip(x(buckets.step).tolist(), low.tolist(), high.tolist(), strict=True)
            if math.isfinite(b) and math.isfinite(t)
        )
        drawn.append(f'<path class="band c{colour}" d="{band}"/>')
    elif line.weight:
        drawn.append(_path(x(buckets.step), y(buckets.mean), f"band c{colour}"))
    return [*drawn, _path(x(buckets.step), y(smooth(buckets.mean, line.weight)), f"c{colour}")]


def _path(across: np.ndarray, down: np.ndarray, classes: str) -> str:
    """A line that is broken where a value is missing."""
    commands, drawing = [], False
    for a, b in zip(across.tolist(), down.tolist(), strict=True):
        if math.isfinite(b):
            commands.append(f"{'L' if drawing else 'M'}{a:.1f} {b:.1f}")
        drawing = math.isfinite(b)
    return f'<path class="{classes}" d="{"".join(commands)}"/>'
