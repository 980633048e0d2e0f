"""SimPO (arXiv:2405.14734): a reference-free preference loss on average log-probs with a target margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import softplus

from longtune.objective.pairs import PairObjective, Pairs, Terms


@dataclass(frozen=True, slots=True)
class Simpo(PairObjective):
    """loss = softplus(-(beta (l_c - l_r) - gamma)), l the mean log-prob of an answer's tokens.

    Attributes:
        beta: strength of the preference.
        gamma: target margin, in the units of beta times log-prob.
    """

    beta: float = 2.0
    gamma: float = 1.0
    name: ClassVar[str] = "simpo"

    def pair_terms(self, pairs: Pairs) -> Terms:
        margin = self.beta * (pairs.chosen_mean - pairs.rejected_mean)
        reported = {
            "correct": (margin > 0).double(),
            "margin": margin,
            "chosen_reward": self.beta * pairs.chosen_mean,
            "rejected_reward": self.beta * pairs.rejected_mean,
        }
        return softplus(self.gamma - margin), reported
