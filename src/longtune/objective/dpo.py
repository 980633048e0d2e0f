"""Direct preference optimisation (arXiv:2305.18290) and its relatives with a reference: IPO (arXiv:2310.12036), hinge
(SLiC, arXiv:2305.10425) and robust DPO (arXiv:2403.00409)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import softplus

from longtune.objective.pairs import PairObjective, Pairs, Terms

_ROUNDING = 1e-6
"""Relative rounding of a sum of log-probs in fp32."""


@dataclass(frozen=True, slots=True)
class Dpo(PairObjective):
    """With h = (s(c) - s_ref(c)) - (s(r) - s_ref(r)) and s the sum of an answer's log-probs:

    sigmoid: softplus(-beta h); hinge: max(0, 1 - beta h); robust: the sigmoid loss corrected for labels that are wrong
    with probability `label_smoothing`; ipo: (h' - 1 / (2 beta))^2 with averages over tokens instead of sums.

    Attributes:
        beta: strength of the preference.
        label_smoothing: for sigmoid, weight of the loss of the reversed pair; for robust, the share of wrong labels.
    """

    beta: float = 0.1
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: float = 0.0
    name: ClassVar[str] = "dpo"
    uses_reference: ClassVar[bool] = True

    def pair_terms(self, pairs: Pairs) -> Terms:
        assert pairs.chosen_reference is not None and pairs.rejected_reference is not None
        chosen, rejected = pairs.chosen - pairs.chosen_reference, pairs.rejected - pairs.rejected_reference
        h = chosen - rejected
        # Before the first update h is 0 in truth, and rounding, which depends on the rows that were computed along, in
        # fact: what lies within it is neither right nor wrong.
        sides = (pairs.chosen, pairs.rejected, pairs.chosen_reference, pairs.rejected_reference)
        noise = _ROUNDING * torch.stack([side.detach().abs() for side in sides]).sum(0)
        reported = {
            "correct": (h > noise).double(),
            "ties": (h.abs() <= noise).double(),
            "margin": self.beta * h,
            "chosen_reward": self.beta * chosen,
            "rejected_reward": self.beta * rejected,
        }
        return self._losses(pairs, chosen, rejected, h), reported

    def _losses(self, pairs: Pairs, chosen: torch.Tensor, rejected: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        right, wrong, smoothing = softplus(-self.beta * h), softplus(self.beta * h), self.label_smoothing
        if self.loss == "sigmoid":
            return (1 - smoothing) * right + smoothing * wrong
        if self.loss == "robust":
            return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
        if self.loss == "hinge":
            return torch.relu(1 - self.beta * h)
        average = chosen / pairs.chosen_count - rejected / pairs.rejected_count
        return (average - 1 / (2 * self.beta)) ** 2
