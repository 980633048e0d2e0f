"""Numbers over steps: columns that grow, buckets of them for a plot, and smoothing.

100,000 steps of a dozen metrics are 10 MB here; a plot sees a few hundred buckets, with the lowest and highest value
of each, so no spike is lost. Knows nothing of events, terminals or pages.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_COLUMNS = 64
"""Metrics of one kind of event; a file that names more is broken."""


class Table:
    """Rows of numbers by step, one column (fp64) for each name; a value that is missing or not finite is NaN."""

    def __init__(self):
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def append(self, step: float, values: dict[str, Any]) -> None:
        """Adds a row; values that are no numbers are left out."""
        before = len(self._steps)
        self._steps.append(step)
        for name, value in values.items():
            if value.__class__ is not float and value.__class__ is not int:
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_COLUMNS:
                    continue
                column = self._columns[name] = array("d", [math.nan]) * before
            try:
                column.append(value)
            except OverflowError:
                # An integer beyond every double.
                column.append(math.nan)
        for column in self._columns.values():
            if len(column) == before:
                column.append(math.nan)

    def cut(self, step: float) -> None:
        """Takes out the rows after a step. Rows are in the order of their steps, as a run writes them."""
        kept = bisect_right(self._steps, step)
        for column in (self._steps, *self._columns.values()):
            del column[kept:]

    def last(self, name: str) -> float | None:
        """The newest value; None without one, or where it was not finite."""
        column = self._columns.get(name)
        return _finite(column[-1]) if column else None

    def steps(self) -> np.ndarray:
        """[rows] fp64; a copy."""
        return np.array(self._steps, dtype=np.float64)

    def column(self, name: str, rows: int | None = None) -> np.ndarray:
        """[rows] fp64, all or the newest; a copy, empty where there is no such column."""
        column = self._columns.get(name, array("d"))
        return np.array(column if rows is None else column[-rows:], dtype=np.float64)

    def buckets(self, name: str, points: int, first: float | None = None, last: float | None = None) -> Buckets:
        """The column in at most `points` buckets, see `Buckets.of`."""
        values = self.column(name)
        return Buckets.of(self.steps()[: len(values)], values, points, first, last)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Neighbouring steps put together: arrays of one length, fp64.

    Attributes:
        step: mean step of each bucket.
        low, high, mean: of the finite values in it; NaN where there are none.
    """

    step: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray

    @classmethod
    def of(
        cls, steps: np.ndarray, values: np.ndarray, points: int, first: float | None = None, last: float | None = None
    ) -> Buckets:
        """Puts values together by equal stretches of steps.

        Args:
            steps: [n], not falling.
            values: [n].
            points: buckets at most; with no more rows than that, every row is a bucket of its own.
            first, last: only steps between these, both included.
        """
        start = 0 if first is None else int(np.searchsorted(steps, first, side="left"))
        end = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
        steps, values = steps[start:end], values[start:end]
        values = np.where(np.isfinite(values), values, np.nan)
        if len(steps) <= points:
            return cls(steps, values, values, values)
        edges = np.linspace(steps[0], steps[-1], points + 1)[:-1]
        starts = np.unique(np.searchsorted(steps, edges, side="left"))
        counts = np.diff(np.append(starts, len(steps)))
        known = np.add.reduceat(np.isfinite(values).astype(np.float64), starts)
        sums = np.add.reduceat(np.nan_to_num(values), starts)
        return cls(
            np.add.reduceat(steps, starts) / counts,
            np.fmin.reduceat(values, starts),
            np.fmax.reduceat(values, starts),
            np.divide(sums, known, out=np.full(len(starts), np.nan), where=known > 0),
        )

    def rounded(self) -> dict[str, list[float | None]]:
        """For JSON: six significant digits, None for NaN; low and high only where they say more than the mean."""
        found = {"step": _listed(self.step), "mean": _listed(self.mean)}
        if not np.array_equal(self.low, self.high, equal_nan=True):
            found |= {"low": _listed(self.low), "high": _listed(self.high)}
        return found


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential moving mean, debiased as in Adam (arXiv:1412.6980, section 3). NaN stays and changes nothing.

    Args:
        values: [n].
        weight: of the past, 0 (nothing is smoothed) to below 1.
    """
    smoothed = np.full(len(values), np.nan)
    total = bias = 0.0
    for index, value in enumerate(values.tolist()):
        if value == value:
            total = weight * total + (1 - weight) * value
            bias = weight * bias + (1 - weight)
            smoothed[index] = total / bias
    return smoothed


def _listed(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
