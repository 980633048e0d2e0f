"""Weights of sources: honoured exactly over all epochs, by seed and epoch alone, and the same after a resume."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtune.data import Batcher, epoch_order, load_dataset
from longtune.data.run_length import run_length
from longtune.data.shares import Share, next_filled
from longtune.errors import UserError
from longtune.tree import Tree

ROWS = st.integers(1, 40)
WEIGHTS = st.one_of(
    st.sampled_from([1.0, 2.0, 0.5, 0.25, 0.29, 2.5, 0.01, 1e-3, 1 / 3]), st.floats(0.02, 4, allow_nan=False)
)
SOURCES = st.lists(st.tuples(ROWS, WEIGHTS), min_size=1, max_size=3)


@dataclass
class Stand:
    """Trees of several sources; tree `i` has 2 + i % 5 tokens."""

    shares: tuple[Share, ...]

    @property
    def trees(self):
        return [Tree.sequence(list(range(2 + i % 5)), row=str(i)) for i in range(self.shares[-1].end)]


def stand(sources):
    shares, first = [], 0
    for number, (rows, weight) in enumerate(sources):
        shares.append(Share(str(number), first, first + rows, weight))
        first += rows
    return Stand(tuple(shares))


@settings(max_examples=60, deadline=None)
@given(SOURCES, st.integers(0, 9), st.integers(1, 12))
def test_after_any_number_of_epochs_every_row_has_come_as_often_as_its_weight_says(sources, seed, epochs):
    shares = stand(sources).shares
    count = shares[-1].end
    seen = Counter(row for epoch in range(epochs) for row in epoch_order(count, seed, epoch, shares))
    for share in shares:
        own = [seen[row] for row in range(share.first, share.end)]
        exact = Fraction(str(share.weight)) * share.rows * epochs
        assert sum(own) == share.drawn(epochs) and abs(sum(own) - exact) <= Fraction(1, 2)
        assert max(own) - min(own) <= 1, "no row comes again before all have come"


def test_a_hundredth_of_24_rows_is_seven_in_thirty_epochs():
    shares = stand([(24, 1.0), (24, 0.01)]).shares
    rare = [row for epoch in range(30) for row in epoch_order(48, 0, epoch, shares) if row >= 24]
    assert len(rare) == len(set(rare)) == 7


def test_which_rows_are_drawn_follows_seed_and_epoch_alone():
    shares = stand([(40, 0.25)]).shares
    drawn = {(seed, epoch): epoch_order(40, seed, epoch, shares) for seed in (0, 1) for epoch in range(4)}
    assert drawn == {key: epoch_order(40, *key, shares) for key in reversed(drawn)}
    assert sorted(row for epoch in range(4) for row in drawn[0, epoch]) == list(range(40))
    assert sorted(drawn[0, 0]) != sorted(drawn[1, 0])


@given(ROWS, WEIGHTS, st.integers(0, 500))
def test_the_epoch_of_a_row_and_the_least_weight_are_the_least(rows, weight, wanted):
    share = Share("s", 0, rows, weight)
    epochs = share.epochs_for(wanted + 1)
    assert share.drawn(epochs) > wanted >= share.drawn(epochs - 1)
    if wanted:
        least = share.least_weight(wanted)
        assert Share("s", 0, rows, least).drawn(wanted) == 1
        assert Share("s", 0, rows, least * 0.9).drawn(wanted) == 0
        assert len(f"{least:.15g}".strip("0.").replace(".", "").split("e")[0].lstrip("0")) <= 2


@settings(max_examples=60, deadline=None)
@given(SOURCES, st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 5), st.integers(1, 40))
def test_epochs_without_a_row_are_passed_over_and_a_resume_goes_on_anywhere(sources, tokens, size, cursor):
    def make():
        return Batcher(stand(sources), batch_size=1 if tokens else size, tokens_per_batch=tokens, longest_first=3)

    straight, resumed = make(), make()
    for _ in range(cursor):
        assert straight.next()
    resumed.load_state(json.loads(json.dumps(straight.state())))
    rows = [[tree.row for tree in batcher.next()] for batcher in (straight, resumed) for _ in range(20)]
    assert rows[:20] == rows[20:] and all(rows)


def test_a_weight_next_to_nothing_costs_no_walk_over_empty_epochs():
    batcher = Batcher(stand([(3, 1e-15)]))
    assert [tree.row for _ in range(3) for tree in batcher.next()] != []
    assert sorted(row for _ in range(3) for row in [batcher.next()[0].row]) == ["0", "1", "2"]
    assert next_filled(stand([(3, 1e-300)]).shares, 0) > 10**298
    assert run_length(Batcher(stand([(3, 1e-15)])), steps=2, epochs=None, accumulate=3).rows == (6,)


@settings(max_examples=80, deadline=None)
@given(
    SOURCES,
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(1, 5),
    st.one_of(st.tuples(st.integers(1, 12), st.none()), st.tuples(st.none(), st.floats(0.1, 9.0))),
    st.integers(1, 4),
)
def test_the_length_of_a_run_is_what_it_sees(sources, tokens, size, given_, accumulate):
    data = stand(sources)

    def make():
        return Batcher(data, batch_size=1 if tokens else size, tokens_per_batch=tokens, longest_first=2)

    steps, epochs = given_
    found = run_length(make(), steps=steps, epochs=epochs, accumulate=accumulate)
    batcher = make()
    trees = [tree for _ in range(found.micro_batches) for tree in batcher.next()]
    assert found.tokens == sum(tree.size for tree in trees)
    rows = Counter(int(tree.row) for tree in trees)
    assert found.rows == tuple(sum(rows[r] for r in range(s.first, s.end)) for s in data.shares)
    assert found.steps == math.ceil(found.micro_batches / accumulate)
    if found.micro_batches:
        assert found.begun >= math.ceil(found.epochs)
    if not tokens and (size == 1 or all(weight % 1 == 0 for _, weight in sources)):
        walked, largest = make(), sum(data.trees[row].size for row in make().largest())
        assert largest >= max((sum(t.size for t in walked.next()) for _ in range(found.micro_batches)), default=0)


@pytest.mark.parametrize("tokens", [None, 9])
def test_a_run_is_planned_for_a_long_row_that_comes_late(tokens):
    data = stand([(1, 1.0), (4, 0.1)])
    batcher = Batcher(data, batch_size=1 if tokens else 2, tokens_per_batch=tokens)
    assert batcher.plan(0) == [[0]]
    assert 4 in batcher.largest() and len(batcher.largest()) == 2


def test_runs_too_long_to_be_walked_are_projected(monkeypatch):
    monkeypatch.setattr("longtune.data.batching.WALKED", 50)
    found = run_length(Batcher(stand([(10, 0.3), (10, 1.0)])), steps=10**12, epochs=None, accumulate=1)
    assert found.micro_batches == 10**12 and found.epochs == pytest.approx(10**12 / 13, rel=0.05)
    # Whole weights need no walk.
    found = run_length(Batcher(stand([(10, 2.0)]), batch_size=3), steps=10**15, epochs=None, accumulate=1)
    assert found.epochs == pytest.approx(10**15 / 7)


@settings(max_examples=60, deadline=None)
@given(SOURCES, st.floats(0.1, 6.0))
def test_what_is_said_of_a_source_never_seen_is_true_and_its_fixes_work(sources, epochs):
    data = stand(sources)
    found = run_length(Batcher(data), steps=None, epochs=epochs, accumulate=2)
    told = {problem.place: problem for problem in found.never_seen(data.shares)}
    assert found.steps or len(told) == len(sources), "a run of no step has a problem for every source"
    for number, (share, seen) in enumerate(zip(data.shares, found.rows, strict=True)):
        noted = any(note.startswith(f"{share.name}:") for note in found.not_reached(data.shares))
        assert (seen == 0) == (share.name in told or noted) and not (share.name in told and noted)
        if share.name not in told:
            continue
        words = told[share.name].fix.replace(",", "").split()
        weight, later = float(words[4]), int(words[10])
        again = run_length(Batcher(data), steps=None, epochs=later, accumulate=2)
        assert share.name not in {problem.place for problem in again.never_seen(data.shares)}
        mended = stand([(rows, weight if i == number else w) for i, (rows, w) in enumerate(sources)])
        again = run_length(Batcher(mended), steps=None, epochs=epochs, accumulate=2)
        assert share.name not in {problem.place for problem in again.never_seen(mended.shares)}


def test_a_source_of_which_no_row_is_left_is_named(write, tokenizer):
    good = write({"prompt": "a", "completion": "b"}, name="good.jsonl")
    bad = write({"prompt": "a", "completion": ""}, {"prompt": "a", "completion": ""}, name="bad.jsonl")
    with pytest.raises(UserError) as caught:
        load_dataset([good, bad], tokenizer, bad_rows="drop")
    (problem,) = caught.value.problems
    assert problem.place == bad and "2 empty answer" in problem.reason and problem.fix


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, True, "1", 1001, 1e300])
def test_weights_that_are_none_are_refused(weight, write, tokenizer):
    with pytest.raises(UserError, match="weight must be"):
        load_dataset([{"path": write({"text": "a"}), "weight": weight}], tokenizer)
