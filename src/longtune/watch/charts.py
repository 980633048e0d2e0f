"""Which metrics are shown together, and how they are called: one list for the terminal, the page and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longtune.watch.view import number, size


def _speed(value: float) -> str:
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    return size(int(value))


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture.

    Attributes:
        key: what programs call it.
        title: what people call it.
        train, validation: metrics of those events that are drawn.
        smoothed: whether the train curve is noise around what matters.
        pairs_only: only runs on pairs of answers have it.
        unit: what round numbers on its axis are multiples of.
        told: a value in few characters.
    """

    key: str
    title: str
    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    smoothed: bool = False
    pairs_only: bool = False
    unit: float = 1.0
    told: Callable[[float], str] = lambda value: number(value, 4)


CHARTS = (
    Chart("loss", "loss", ("loss",), ("loss",), smoothed=True),
    Chart("accuracy", "accuracy", ("accuracy",), ("accuracy",), smoothed=True, pairs_only=True),
    Chart("margin", "margin", ("margin",), ("margin",), smoothed=True, pairs_only=True),
    Chart("learning_rate", "learning rate", ("learning_rate",), told=lambda value: f"{value:.2e}"),
    Chart("grad_norm", "gradient norm", ("grad_norm",), smoothed=True),
    Chart("tokens_per_second", "tokens/s", ("tokens_per_second",), told=_speed),
    Chart("memory", "memory", ("peak_bytes", "active_bytes"), unit=2.0**30, told=_bytes),
)


def charts_for(has_pairs: bool) -> list[Chart]:
    """The charts of a run."""
    return [chart for chart in CHARTS if has_pairs or not chart.pairs_only]
