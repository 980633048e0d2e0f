"""Validation: the same walk and the same reduction as training, forward only, over always the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longtune.data import epoch_order
from longtune.engine import Engine
from longtune.objective.base import Objective, Totals
from longtune.tree import Forest, Tree


@dataclass(frozen=True, slots=True)
class Validation:
    """What a validation found.

    Attributes:
        metrics: the objective's, over all rows at once; has `loss`.
        rows, skipped: rows used, and rows of the data that were not.
        tokens, trained_tokens: tokens read, and targets among them.
        seconds: wall time.
    """

    metrics: dict[str, float]
    rows: int
    skipped: int
    tokens: int
    trained_tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.metrics,
            "rows": self.rows,
            "skipped": self.skipped,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "seconds": round(self.seconds, 3),
        }


class Stopped(Exception):
    """The run is to leave: what was being measured is left for the run that resumes it."""


def choose_rows(trees: Sequence[Tree], most: int | None) -> list[Tree]:
    """At most `most` rows (None: all), spread over the data and the same in every run, in the data's order."""
    return [trees[index] for index in chosen_rows(len(trees), most)]


def chosen_rows(count: int, most: int | None) -> list[int]:
    """The indices of `choose_rows`."""
    if most is None or count <= most:
        return list(range(count))
    return sorted(epoch_order(count, 0, 0)[:most])


def validate(
    engine: Engine,
    objective: Objective,
    trees: Sequence[Tree],
    *,
    batch_size: int = 1,
    skipped: int = 0,
    stopped: Callable[[], object] = lambda: None,
) -> Validation:
    """The objective's metrics over `trees`.

    Args:
        batch_size: rows laid end to end in one forward; changes memory and time, not the result.
        skipped: rows left out by `choose_rows`, for the report.
        stopped: asked before every forward.

    Raises:
        Stopped: `stopped` said yes.
    """
    start = time.perf_counter()
    forests = [
        Forest(trees[first : first + batch_size], prompt_targets=objective.uses_prompt_targets)
        for first in range(0, len(trees), batch_size)
    ]
    totals = add_up([objective.totals(forest) for forest in forests])
    parts: list[Totals] = []
    for forest in forests:
        if stopped():
            raise Stopped
        parts.append(engine.evaluate(forest, objective, totals))
    sums = add_up(parts)
    return Validation(
        metrics=objective.metrics(sums, totals),
        rows=len(trees),
        skipped=skipped,
        tokens=sum(forest.size for forest in forests),
        trained_tokens=sum(len(forest.targets) for forest in forests),
        seconds=time.perf_counter() - start,
    )


def add_up(parts: Sequence[Totals]) -> Totals:
    """Sum by name."""
    whole: Totals = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = whole.get(name, 0.0) + value
    return whole
