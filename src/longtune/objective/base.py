"""The contract of an objective: token log-probs in, loss and one cotangent per log-prob out.

An objective never sees a model. The engine asks it for `totals` of every micro-batch of an optimiser
step before the first forward, adds them up (over ranks too), and hands the sums back, so denominators
are those of the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from longtune.tree import Forest

Totals = dict[str, float]
"""Denominators of an optimiser step, by name; they add up over micro-batches and ranks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one micro-batch contributes to the step.

    Attributes:
        sums: additive contributions, by name, fp32/fp64 scalars; summed over the micro-batches of a step they
            are what `Objective.metrics` reads. `loss` is always there, already divided by the step's totals.
        cotangent: d(loss) / d(log-prob), float32 [M].
    """

    sums: dict[str, float]
    cotangent: torch.Tensor


class Objective(Protocol):
    """Turns log-probs into a loss."""

    name: str
    uses_reference: bool
    """Whether trees must carry reference log-probs (`Tree.reference`)."""
    uses_prompt_targets: bool
    """Whether targets in a pair's prompt are wanted; without them the head does not compute them."""

    def totals(self, forest: Forest) -> Totals:
        """What this micro-batch adds to the step's denominators."""
        ...

    def known_cotangent(self, forest: Forest, totals: Totals) -> torch.Tensor | None:
        """The cotangents [M] where they do not depend on the log-probs (then the head needs one pass), else None."""
        ...

    def __call__(self, forest: Forest, log_probs: torch.Tensor, totals: Totals) -> Outcome:
        """Loss and cotangents of one micro-batch from fp32 log-probs [M] in the order of `forest.targets`."""
        ...

    def metrics(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        """What is reported for a step (or an evaluation), from the sums over its micro-batches; has `loss`."""
        ...
