"""Preference objectives on given log-probs: pins, identities, and cotangents against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from longtune.objective import get
from longtune.objective.pairs import answer_sums, log1mexp
from longtune.tree import PROMPT, Forest, Node, Targets, Tree


def tree(counts: tuple[int, ...], prompt: int = 2, weight: float = 1.0, reference=None, prompt_targets: bool = False):
    """A prompt with answers of `counts` tokens, every answer token trained."""
    nodes = [Node(torch.full((prompt,), 7))] + [Node(torch.full((n,), 9), 0) for n in counts]
    hidden, answer = ([0] * (prompt - 1), [PROMPT] * (prompt - 1)) if prompt_targets else ([], [])
    column = prompt
    for number, count in enumerate(counts):
        hidden += [prompt - 1, *range(column, column + count - 1)]
        answer += [number] * count
        column += count
    token = [7 if a == PROMPT else 9 for a in answer]
    return Tree(tuple(nodes), Targets.of(hidden, token, None, answer), "row", weight, reference=reference)


def run(objective, forest: Forest, values: list[float]) -> dict[str, float]:
    totals = objective.totals(forest)
    return objective.metrics(objective(forest, torch.tensor(values, dtype=torch.float64), totals).sums, totals)


def test_orpo_pins():
    one = Forest([tree((1, 1))])
    found = run(get("orpo", weight=0.1, sft_scope="response"), one, [-0.7, -1.9])
    assert found["loss"] == pytest.approx(0.71640664, abs=5e-8)
    three = Forest([tree((1, 1)) for _ in range(3)])
    values = [-0.5, -1.5, -1.2, -1.0, -0.8, -2.3]
    for weight, pin in ((0.1, 0.87177974), (1.0, 1.21779715)):
        found = run(get("orpo", weight=weight, sft_scope="response"), three, values)
        assert found["loss"] == pytest.approx(pin, abs=5e-8)
    assert (found["correct"], found["pairs"], found["accuracy"]) == (2, 3, pytest.approx(2 / 3))


def test_orpo_full_scope_counts_the_prompt_once():
    forest = Forest([tree((2, 3), prompt=4, prompt_targets=True)])
    values = [-1.0, -2.0, -3.0, -0.5, -0.7, -1.5, -1.6, -1.7]
    found = run(get("orpo", weight=0.0), forest, values)
    assert found["loss"] == pytest.approx((1 + 2 + 3 + 0.5 + 0.7) / 5)
    without = Forest(forest.trees, prompt_targets=False)
    assert len(without.targets) == len(forest.targets) - 3
    response = run(get("orpo", weight=0.0, sft_scope="response"), without, values[3:])
    assert response["loss"] == pytest.approx(0.6)


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "robust", "ipo"])
def test_dpo_without_a_difference_to_the_reference(loss):
    smoothing = 0.1 if loss in ("sigmoid", "robust") else 0.0
    forest = Forest([tree((2, 3), reference=(-2.0, -4.5))])
    found = run(get("dpo", beta=0.1, loss=loss, label_smoothing=smoothing), forest, [-1.0, -1.0, -1.5, -1.5, -1.5])
    expected = {"sigmoid": math.log(2), "robust": math.log(2), "hinge": 1.0, "ipo": 25.0}[loss]
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["margin"] == 0 and found["accuracy"] == 0
    assert found["ties"] == found["pairs"] == 1


def objectives() -> list:
    return [
        get("dpo", beta=0.3),
        get("dpo", beta=0.3, label_smoothing=0.2),
        get("dpo", beta=0.3, loss="robust", label_smoothing=0.2),
        get("dpo", beta=0.3, loss="ipo"),
        get("dpo", beta=0.3, loss="hinge"),
        get("orpo", weight=0.7),
        get("orpo", weight=0.7, sft_scope="response"),
        get("simpo"),
    ]


@pytest.mark.parametrize("objective", objectives(), ids=str)
def test_cotangents_are_the_derivatives_of_the_loss(objective):
    """Several trees with weights, one with three rejected answers, over two micro-batches of one step."""
    trees = [
        tree((2, 3), 3, 1.0, (-2.0, -3.5), True),
        tree((1, 2, 4, 1), 2, 0.5, (-1.0, -1.5, -5.0, -0.3), True),
        tree((3, 1), 4, 2.0, (-4.0, -1.2), True),
    ]
    forests = [Forest(trees[:2], objective.uses_prompt_targets), Forest(trees[2:], objective.uses_prompt_targets)]
    parts = [objective.totals(forest) for forest in forests]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    generator = torch.Generator().manual_seed(0)
    values = [-0.1 - 2 * torch.rand(len(f.targets), generator=generator, dtype=torch.float64) for f in forests]

    def loss(values) -> float:
        return sum(objective(f, v, totals).sums["loss"] for f, v in zip(forests, values, strict=True))

    for index, forest in enumerate(forests):
        cotangent = objective(forest, values[index], totals).cotangent
        for at in range(len(forest.targets)):
            changed = [v.clone() for v in values]
            changed[index][at] += 1e-6
            up = loss(changed)
            changed[index][at] -= 2e-6
            assert (up - loss(changed)) / 2e-6 == pytest.approx(float(cotangent[at]), abs=1e-7)


def test_answer_sums_are_what_a_reference_is_made_of():
    forest = Forest([tree((2, 1), prompt_targets=True), tree((1, 1, 2))])
    values = torch.tensor([-9.0, -1, -2, -3, -4, -5, -6, -7])
    assert answer_sums(forest, values) == [(-3.0, -3.0), (-4.0, -5.0, -13.0)]


@pytest.mark.parametrize("value", [-1e-30, -1e-12, -0.3, -math.log(2), -1.0, -50.0, -1e4])
def test_log1mexp_is_stable(value):
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    found = log1mexp(x)
    (slope,) = torch.autograd.grad(found, x)
    assert torch.isfinite(found) and torch.isfinite(slope)
    expected = math.log(-math.expm1(value)) if value > -1 else math.log1p(-math.exp(value))
    assert float(found.detach()) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_certain_answers_give_finite_odds():
    found = run(get("orpo", weight=1.0, sft_scope="response"), Forest([tree((1, 1))]), [0.0, -0.5])
    assert math.isfinite(found["loss"])


def test_a_tree_without_an_answer_is_named():
    forest = Forest([tree((2,))])
    with pytest.raises(ValueError, match="row"):
        get("orpo").totals(forest)


def test_dpo_asks_for_references():
    forest = Forest([tree((1, 1))])
    objective = get("dpo")
    with pytest.raises(ValueError, match="reference"):
        objective(forest, torch.zeros(2), objective.totals(forest))
