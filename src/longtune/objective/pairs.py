"""What the preference objectives share: answers of token trees as pairs of log-prob sums.

A tree's answer 0 is the chosen one, every other answer a rejected one; each (chosen, rejected) is one pair, and losses
are means over the pairs of the whole step, each with its tree's weight. An objective only says what a pair costs, as a
differentiable function of the answers' sums; the cotangents of the token log-probs follow from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from longtune.objective.base import Outcome, Totals
from longtune.tree import PROMPT, Forest

Terms = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of one micro-batch; all float64 [P].

    Attributes:
        chosen, rejected: weighted sums of the answers' log-probs.
        chosen_count, rejected_count: sums of their targets' weights (tokens, where no target is weighted).
        chosen_reference, rejected_reference: the reference model's sums; None without a reference.
        weight: weight of each pair.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_count: torch.Tensor
    rejected_count: torch.Tensor
    chosen_reference: torch.Tensor | None
    rejected_reference: torch.Tensor | None
    weight: torch.Tensor

    @property
    def chosen_mean(self) -> torch.Tensor:
        return self.chosen / self.chosen_count

    @property
    def rejected_mean(self) -> torch.Tensor:
        return self.rejected / self.rejected_count


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the answers of a forest lie.

    Attributes:
        slot: the answer of each target, int64 [M]; -1 for prompt targets.
        chosen, rejected: slots of each pair's answers, int64 [P].
        tree: tree of each pair, int64 [P].
        slots: answers in all.
    """

    slot: torch.Tensor
    chosen: torch.Tensor
    rejected: torch.Tensor
    tree: torch.Tensor
    slots: int

    def add_up(self, values_M: torch.Tensor) -> torch.Tensor:
        """Sum of float64 values over each answer's targets, [slots]."""
        inside = self.slot >= 0
        return torch.zeros(self.slots, dtype=torch.float64).index_add_(0, self.slot[inside], values_M[inside])


def _layout(forest: Forest) -> _Layout:
    targets = forest.targets
    first = 0
    slot = torch.full_like(targets.answer, -1)
    chosen: list[int] = []
    rejected: list[int] = []
    homes: list[int] = []
    for index, tree in enumerate(forest.trees):
        answers = 1 + int(tree.targets.answer.max()) if len(tree.targets) else 0
        if answers < 2 or any(not bool((tree.targets.answer == a).any()) for a in range(answers)):
            raise ValueError(f"row {tree.row or index}: a preference tree needs trained tokens in every answer")
        mine = (targets.tree == index) & (targets.answer != PROMPT)
        slot[mine] = targets.answer[mine] + first
        chosen += [first] * (answers - 1)
        rejected += range(first + 1, first + answers)
        homes += [index] * (answers - 1)
        first += answers
    as_index = torch.tensor
    return _Layout(slot, as_index(chosen), as_index(rejected), as_index(homes), first)


def answer_sums(forest: Forest, log_probs: torch.Tensor) -> list[tuple[float, ...]]:
    """For each tree, the weighted sum of the log-probs of each of its answers: what a reference is made of."""
    layout = _layout(forest)
    sums = layout.add_up(log_probs.double() * forest.targets.weight)
    found: list[tuple[float, ...]] = []
    first = 0
    for tree in forest.trees:
        count = 1 + int(tree.targets.answer.max())
        found.append(tuple(sums[first : first + count].tolist()))
        first += count
    return found


class PairObjective(ABC):
    """Base of the preference objectives; subclasses are frozen dataclasses with a `name` and their settings."""

    name: str
    uses_reference = False
    """Whether trees must carry reference log-probs."""
    uses_prompt_targets = False
    """Whether targets in the prompt are wanted."""

    @abstractmethod
    def pair_terms(self, pairs: Pairs) -> Terms:
        """The cost of each pair [P] (differentiable) and what is reported: per-pair values [P], by name."""

    def token_term(self, forest: Forest, log_probs: torch.Tensor, totals: Totals) -> tuple[float, torch.Tensor] | None:
        """A loss on single tokens besides the pairs': its value, already divided, and cotangents [M]."""
        return None

    def totals(self, forest: Forest) -> Totals:
        layout = _layout(forest)
        weight = torch.tensor([tree.weight for tree in forest.trees], dtype=torch.float64)
        return {
            "pairs": float(len(layout.chosen)),
            "weight": float(weight[layout.tree].sum()),
            "targets": float(len(forest.targets)),
            "rows": float(len(forest.trees)),
        }

    def known_cotangent(self, forest: Forest, totals: Totals) -> torch.Tensor | None:
        return None

    def __call__(self, forest: Forest, log_probs: torch.Tensor, totals: Totals) -> Outcome:
        layout = _layout(forest)
        inside = layout.slot >= 0
        weight_M = forest.targets.weight.double()
        sums = layout.add_up(log_probs.double() * weight_M)
        counts = layout.add_up(weight_M)
        reference = self._reference(forest)
        with torch.enable_grad():
            leaf = sums.requires_grad_()
            pairs = Pairs(
                leaf[layout.chosen],
                leaf[layout.rejected],
                counts[layout.chosen],
                counts[layout.rejected],
                None if reference is None else reference[layout.chosen],
                None if reference is None else reference[layout.rejected],
                torch.tensor([forest.trees[i].weight for i in layout.tree.tolist()], dtype=torch.float64),
            )
            losses, reported = self.pair_terms(pairs)
            loss = (losses * pairs.weight).sum() / totals["weight"]
            (dsums,) = torch.autograd.grad(loss, leaf)
        cotangent = torch.zeros_like(weight_M)
        cotangent[inside] = dsums[layout.slot[inside]] * weight_M[inside]
        additive = {name: float(value.detach().double().sum()) for name, value in reported.items()}
        additive["loss"] = float(loss.detach())
        above = (pairs.chosen_mean > pairs.rejected_mean).detach()
        additive["log_prob_correct"] = float(above.sum())
        additive["log_prob_margin"] = float((pairs.chosen_mean - pairs.rejected_mean).detach().sum())
        extra = self.token_term(forest, log_probs, totals)
        if extra is not None:
            additive["nll"] = extra[0]
            additive["loss"] += extra[0]
            cotangent += extra[1]
        return Outcome(additive, cotangent.to(torch.promote_types(log_probs.dtype, torch.float32)))

    def metrics(self, sums: dict[str, float], totals: Totals) -> dict[str, float]:
        """`loss`, the per-pair means, `accuracy` with `correct` of `pairs`, and the same by average log-prob.

        `ties`, where the method counts them, are pairs that are not correct because both sides are equal.
        """
        pairs = totals["pairs"]
        whole = ("loss", "nll", "correct", "ties", "log_prob_correct")
        found = {name: value if name in whole else value / pairs for name, value in sums.items()}
        found["accuracy"] = sums["correct"] / pairs
        found["log_prob_accuracy"] = sums["log_prob_correct"] / pairs
        found["pairs"] = pairs
        return found

    def _reference(self, forest: Forest) -> torch.Tensor | None:
        if not self.uses_reference:
            return None
        values: list[float] = []
        for tree in forest.trees:
            if tree.reference is None:
                raise ValueError(f"row {tree.row}: the tree carries no reference log-probs")
            values += tree.reference
        return torch.tensor(values, dtype=torch.float64)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, stable on both sides of -ln 2 (Maechler 2012).

    Where x rounds to 0 (a probability of one) it is taken as the largest negative number, so that odds stay finite.
    """
    x = torch.clamp(x, max=-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    safe_near, safe_far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(safe_near)), torch.log1p(-torch.exp(safe_far)))
