"""Odds-ratio preference optimisation (arXiv:2403.07691): likelihood of the chosen answer plus the odds of the pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import softplus

from longtune.objective.base import Totals
from longtune.objective.pairs import PairObjective, Pairs, Terms, log1mexp
from longtune.tree import Forest


@dataclass(frozen=True, slots=True)
class Orpo(PairObjective):
    """loss = L_NLL + weight * mean(softplus(-log_odds)), with l the mean log-prob of an answer's tokens and
    log_odds = (l_c - l_r) - (log1mexp(l_c) - log1mexp(l_r)).

    Attributes:
        weight: weight of the odds term (lambda).
        sft_scope: `full`: L_NLL is the token mean over all next-token targets of the step's chosen sequences, prompt
            included; `response`: the mean over trees of -l_c. The odds use the answers alone under both.
    """

    weight: float = 0.1
    sft_scope: Literal["full", "response"] = "full"
    name: ClassVar[str] = "orpo"

    @property
    def uses_prompt_targets(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sft_scope == "full"

    def pair_terms(self, pairs: Pairs) -> Terms:
        chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
        log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
        odds = softplus(-log_odds)
        reported = {"odds": odds, "correct": (chosen > rejected).double(), "margin": log_odds}
        return self.weight * odds, reported

    def _nll_weights(self, forest: Forest) -> torch.Tensor:
        """Weight of each target in the likelihood term, float64 [M], before dividing by the step's total."""
        targets = forest.targets
        row = torch.tensor([tree.weight for tree in forest.trees], dtype=torch.float64)
        chosen = targets.weight.double() * (targets.answer == 0)
        if self.sft_scope == "full":
            return targets.weight.double() * (targets.answer <= 0) * row[targets.tree]
        count = torch.zeros(len(forest.trees), dtype=torch.float64).index_add_(0, targets.tree, chosen)
        return chosen / count[targets.tree] * row[targets.tree]

    def totals(self, forest: Forest) -> Totals:
        return {**PairObjective.totals(self, forest), "nll": float(self._nll_weights(forest).sum())}

    def token_term(self, forest: Forest, log_probs: torch.Tensor, totals: Totals) -> tuple[float, torch.Tensor]:
        cotangent = -self._nll_weights(forest) / totals["nll"]
        return float((cotangent * log_probs.double()).sum()), cotangent
