"""Pairs on a token tree equal the same pairs as separate whole sequences: losses and every gradient (fp64)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from longtune.engine import Engine, Plan
from longtune.objective import get
from longtune.tree import PROMPT, Forest, Node, Targets, Tree
from tests import support

OBJECTIVES = {
    "dpo": get("dpo", beta=0.3),
    "orpo": get("orpo", weight=0.7),
    "orpo response": get("orpo", weight=0.7, sft_scope="response"),
}
PROMPT_TOKENS = 9


def shared(answers: tuple[int, ...], seed: int = 0) -> Tree:
    tree = support.pair_tree(PROMPT_TOKENS, answers, seed=seed)
    return dataclasses.replace(tree, reference=tuple(-4.0 * n - 0.1 * i for i, n in enumerate(answers)))


def separate(tree: Tree) -> Tree:
    """Every answer with a prompt of its own; the prompt's targets on the chosen one."""
    prompt, *answers = tree.nodes
    nodes, hidden, order = [], [], []
    offset = 0
    place = {column: column for column in range(PROMPT_TOKENS)}
    first = PROMPT_TOKENS
    for number, answer in enumerate(answers):
        nodes.append(Node(torch.cat([prompt.tokens, answer.tokens])))
        place |= {first + i: PROMPT_TOKENS + i for i in range(answer.tokens.numel())}
        first += answer.tokens.numel()
        mine = (tree.targets.answer == number) | ((tree.targets.answer == PROMPT) & (number == 0))
        order += mine.nonzero().flatten().tolist()
        hidden += [offset + place[column] for column in tree.targets.hidden[mine].tolist()]
        offset += nodes[-1].tokens.numel()
    t = tree.targets
    targets = Targets.of(hidden, t.token[order], t.weight[order], t.answer[order])
    return dataclasses.replace(tree, nodes=tuple(nodes), targets=targets)


def step(engine: Engine, trees: list[Tree], name: str, chunk: int | None):
    """(loss, gradients) of one step over one forest."""
    engine.set_plan(Plan(chunk_tokens=chunk))
    objective = OBJECTIVES[name]
    forest = Forest(trees, prompt_targets=objective.uses_prompt_targets)
    totals = objective.totals(forest)
    loss = engine.accumulate(forest, objective, totals)["loss"]
    found = support.gradients(engine.model)
    engine.model.zero_grad()
    return loss, found


def check(engine: Engine, trees: list[Tree], name: str, chunks: tuple[int | None, ...], tolerance: float) -> None:
    apart = [separate(tree) for tree in trees]
    # Both ways of one pair: counted tokens P + R_c + R_r against 2 P + R_c + R_r.
    saved = sum(PROMPT_TOKENS * (len(tree.nodes) - 2) for tree in trees)
    assert Forest(trees).size == Forest(apart).size - saved
    loss, truth = step(engine, apart, name, None)
    for chunk in chunks:
        ours, found = step(engine, trees, name, chunk)
        assert abs(ours / loss - 1) < tolerance, chunk
        assert support.worst(found, truth) < tolerance, chunk


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("answers", [(1, 2), (2, 40), (40, 1), (3, 1, 2, 40)], ids=str)
def test_a_tree_equals_separate_sequences(answers, name):
    engine = Engine(support.with_lora(support.clean_llama()))
    check(engine, [shared(answers)], name, (1, 5, None), 1e-9)
    engine.close()


@pytest.mark.parametrize("model", support.ARCHITECTURES)
def test_trees_equal_separate_sequences_on_every_architecture(model):
    engine = Engine(support.with_lora(support.tiny_model(model)))
    trees = [shared((40, 1)), shared((2, 1, 2, 5), seed=1)]
    for name, chunks in (("dpo", (1, 5)), ("orpo", (5, None))):
        check(engine, trees, name, chunks, 1e-5)
    engine.close()


def test_reference_log_probs_of_a_tree_equal_those_of_separate_sequences():
    from longtune.train.references import Reference

    model = support.with_lora(support.clean_llama())
    engine = Engine(model, Plan(chunk_tokens=5))
    trees = [shared((40, 1)), shared((2, 1, 2, 5), seed=1)]
    found = Reference(engine, model).sums(trees)
    with torch.no_grad(), model.disable_adapter():
        apart = [separate(tree) for tree in trees]
        for tree, sums in zip(apart, found, strict=True):
            forest = Forest([tree], prompt_targets=False)
            lp = support.oracle_log_probs(model, forest) * forest.targets.weight.double()
            expected = [float(lp[forest.targets.answer == a].sum()) for a in range(len(sums))]
            assert sums == pytest.approx(expected, rel=1e-9)
    engine.close()
