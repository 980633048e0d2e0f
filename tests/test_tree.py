"""Trees and forests: places, positions, paths, chunks and targets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtune.tree import PROMPT, Forest, Node, Targets, Tree


def node(count: int, parent: int = -1) -> Node:
    return Node(torch.arange(count), parent)


def test_a_pair_has_one_prompt_and_children_that_start_at_one_position():
    tree = Tree((node(5), node(3, 0), node(2, 0)), Targets.of([4, 4], [1, 2], None, [0, 1]))
    forest = Forest([tree])
    assert forest.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6]
    assert forest.path(1) == [(0, 8)]
    assert forest.path(2) == [(0, 5), (8, 10)]
    assert forest.lengths == [8, 7]
    assert not forest.is_single_sequence


def test_targets_move_with_their_trees():
    one = Tree.sequence([3, 4, 5], [0, 0, 2])
    two = Tree((node(2), node(2, 0)), Targets.of([0, 1], [9, 8], [1, 0.5], [PROMPT, 0]))
    forest = Forest([one, two])
    assert forest.targets.hidden.tolist() == [1, 3, 4]
    assert forest.targets.token.tolist() == [5, 9, 8]
    assert forest.targets.weight.tolist() == [2, 1, 0.5]
    assert forest.targets.tree.tolist() == [0, 1, 1]
    assert Forest([one, two], prompt_targets=False).targets.token.tolist() == [5, 8]


def test_first_position_moves_position_ids_and_not_the_depth():
    tree = Tree((node(3),), Targets.of([], []), first_position=7)
    forest = Forest([tree])
    assert forest.positions.tolist() == [7, 8, 9]
    assert forest.chunks(2)[1].spans[0].position == 2


@pytest.mark.parametrize(
    "nodes",
    [(), (Node(torch.empty(0, dtype=torch.int64)),), (node(1, 0),), (node(1), node(1, 1)), (node(1), node(1, 5))],
)
def test_malformed_trees_are_refused(nodes):
    with pytest.raises(ValueError):
        Tree(nodes, Targets.of([], []))


def test_an_empty_forest_and_an_empty_chunk_are_refused():
    with pytest.raises(ValueError):
        Forest([])
    with pytest.raises(ValueError):
        Forest([Tree.sequence([1, 2])]).chunks(0)


@st.composite
def forests(draw) -> Forest:
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        nodes = [node(draw(st.integers(1, 6)))]
        for index in range(draw(st.integers(0, 4))):
            nodes.append(node(draw(st.integers(1, 6)), draw(st.integers(-1, index))))
        trees.append(Tree(tuple(nodes), Targets.of([0], [1])))
    return Forest(trees)


@given(forests(), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_chunks_cover_the_row_and_spans_see_exactly_their_ancestors(forest, size):
    chunks = forest.chunks(size)
    assert [c for chunk in chunks for c in range(chunk.start, chunk.end)] == list(range(forest.size))
    assert all(chunk.size <= size for chunk in chunks)
    # Whom each column may see, from the parents alone.
    sees: dict[int, list[int]] = {}
    column = 0
    for tree in forest.trees:
        ends: list[list[int]] = []
        for n in tree.nodes:
            seen = list(ends[n.parent]) if n.parent >= 0 else []
            for _ in range(n.tokens.numel()):
                seen = [*seen, column]
                sees[column] = seen
                column += 1
            ends.append(seen)
    for chunk in chunks:
        covered = []
        for span in chunk.spans:
            past = [c for start, end in span.past for c in range(start, end)]
            assert len(past) == span.position
            assert all(
                a[1] < b[0] or b[1] <= a[0] or a[1] != b[0] for a, b in zip(span.past, span.past[1:], strict=False)
            )
            for at in range(span.start, span.end):
                assert past + list(range(span.start, at + 1)) == sees[at]
                assert int(forest.positions[at]) == len(sees[at]) - 1
                covered.append(at)
        assert covered == list(range(chunk.start, chunk.end))
