"""Sequences to token trees: nothing is lost, nothing is shared that differs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longtune.data.encoding import Sequence_, Span
from longtune.data.trees import Example, windows
from longtune.tree import Forest


@st.composite
def sequences(draw):
    """Sequences over few ids, so that they share starts; each with trained spans."""
    found = []
    for answer in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=12))
        cuts = sorted(draw(st.sets(st.integers(0, len(ids)), min_size=2, max_size=4)))
        spans = [Span(a, b, 1.0 + a, answer) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        found.append(Sequence_(np.array(ids, dtype=np.int32), [*spans, Span(len(ids) - 1, len(ids), 1.0, answer)]))
    return found


def expected(sequences):
    """(context, token, weight, answer) of every target, sequence by sequence."""
    return [
        (s.ids[:t].tolist(), int(s.ids[t]), span.weight, span.answer)
        for s in sequences
        for span in s.spans
        for t in range(max(span.start, 1), span.end)
    ]


def found(tree):
    forest = Forest([tree])
    ends = np.cumsum([node.tokens.numel() for node in tree.nodes])
    rows = []
    targets = tree.targets
    for column, token, weight, answer in zip(
        targets.hidden.tolist(), targets.token.tolist(), targets.weight.tolist(), targets.answer.tolist(), strict=True
    ):
        path = forest.path(int(np.searchsorted(ends, column, side="right")))
        context = [int(forest.tokens[t]) for low, high in path for t in range(low, high) if t <= column]
        rows.append((context, token, weight, answer))
    return rows


@settings(max_examples=300, deadline=None)
@given(sequences(), st.sampled_from([None, 0, 1, 3]))
def test_every_target_keeps_its_context(sequences, share):
    example = Example.of("row", 1.0, sequences, share)
    tree = example.tree()
    assert found(tree) == expected(sequences)
    assert tree.size == example.size <= sum(len(s.ids) for s in sequences)
    if share == 0:
        assert len(tree.nodes) == len(sequences) and all(node.parent == -1 for node in tree.nodes)
    if share is None:
        for node in tree.nodes:
            starts = [int(n.tokens[0]) for n in tree.nodes if n.parent == node.parent]
            assert len(set(starts)) == len(starts)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 60), st.integers(2, 20))
def test_windows_train_every_token_once(count, limit):
    whole = Sequence_(np.arange(count, dtype=np.int32), [Span(0, count)])
    parts = [Example.of("row", 1.0, [part]).tree() for part in windows(whole, limit)]
    assert [t for tree in parts for t in tree.targets.token.tolist()] == list(range(1, count))
    assert all(tree.size <= limit for tree in parts)
