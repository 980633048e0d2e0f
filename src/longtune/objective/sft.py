"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from longtune.objective.base import Outcome, Totals
from longtune.tree import Forest


@dataclass(frozen=True, slots=True)
class Sft:
    """loss = sum(-w lp) / sum(w) over all trained targets of the step.

    Attributes:
        normalisation: `token` is the mean over the step's targets; `sequence` is the mean over rows of each row's own
            token mean.
    """

    normalisation: Literal["token", "sequence"] = "token"
    name: ClassVar[str] = "sft"
    uses_reference: ClassVar[bool] = False
    uses_prompt_targets: ClassVar[bool] = True

    def _weights(self, forest: Forest) -> torch.Tensor:
        targets = forest.targets
        row = torch.tensor([tree.weight for tree in forest.trees])
        weight = targets.weight * row[targets.tree]
        if self.normalisation == "token":
            return weight
        per_row = torch.zeros(len(forest.trees)).index_add_(0, targets.tree, targets.weight)
        return weight / per_row[targets.tree]

    def totals(self, forest: Forest) -> Totals:
        return {
            "weight": float(self._weights(forest).double().sum()),
            "targets": float(len(forest.targets)),
            "rows": float(len(forest.trees)),
        }

    def known_cotangent(self, forest: Forest, totals: Totals) -> torch.Tensor:
        return -self._weights(forest) / totals["weight"]

    def __call__(self, forest: Forest, log_probs: torch.Tensor, totals: Totals) -> Outcome:
        cotangent = self.known_cotangent(forest, totals)
        return Outcome({"loss": float((cotangent.double() * log_probs.double()).sum())}, cotangent)

    def metrics(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        return {"loss": sums["loss"]}
