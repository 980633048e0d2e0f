"""Order and batches: every row once an epoch, a function of seed and epoch, and exact resume."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtune.data import Batcher, epoch_order, load_dataset
from longtune.tree import Forest, Tree

TREES = [Tree.sequence(list(range(2 + i % 7)), row=str(i)) for i in range(23)]


def rows(batch):
    return [tree.row for tree in batch]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**32), st.integers(0, 5))
def test_order_is_a_permutation_and_a_function_of_seed_and_epoch(count, seed, epoch):
    order = epoch_order(count, seed, epoch)
    assert sorted(order) == list(range(count))
    assert order == epoch_order(count, seed, epoch)
    if count > 20:
        assert order != epoch_order(count, seed, epoch + 1) and order != epoch_order(count, seed + 1, epoch)


@settings(max_examples=50, deadline=None)
@given(
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(1, 30),
    st.integers(0, 99),
    st.integers(0, 30),
    st.integers(0, 60),
)
def test_every_row_once_an_epoch_and_resume_at_any_cursor(tokens, size, seed, longest, cursor):
    def make():
        return Batcher(TREES, batch_size=size, tokens_per_batch=tokens, seed=seed, longest_first=longest)

    batcher = make()
    for _ in range(2):
        epoch = [batcher.next() for _ in range(len(batcher))]
        assert sorted(row for batch in epoch for row in rows(batch)) == sorted(rows(TREES))
        batcher.plan(batcher.epoch + 1)
        if batcher.index == len(batcher):
            batcher.epoch, batcher.index = batcher.epoch + 1, 0
    straight = make()
    for _ in range(cursor):
        straight.next()
    resumed = make()
    resumed.load_state(json.loads(json.dumps(straight.state())))
    assert [rows(resumed.next()) for _ in range(30)] == [rows(straight.next()) for _ in range(30)]


def test_batches_hold_the_asked_number_of_rows():
    sizes = [len(batch) for batch, _ in zip(Batcher(TREES, batch_size=5), range(5), strict=False)]
    assert sizes == [5, 5, 5, 5, 3]


def test_token_batches_are_full_and_never_over_the_limit():
    batcher = Batcher(TREES, tokens_per_batch=16)
    batches = [batcher.next() for _ in range(len(batcher))]
    assert all(sum(tree.size for tree in batch) <= 16 for batch in batches)
    assert len(batches) <= -(-sum(tree.size for tree in TREES) // 16) + 1
    assert len(Batcher(TREES, tokens_per_batch=1).next()) == 1


def test_packed_rows_stay_apart():
    batch = Batcher(TREES, tokens_per_batch=16).next()
    forest = Forest(batch)
    for chunk in forest.chunks(3):
        for span in chunk.spans:
            own = max(offset for offset in forest.offsets if offset <= span.start)
            assert all(low >= own for low, _ in span.past)


def test_the_longest_rows_come_first_in_the_first_epoch_alone():
    sizes = {tree.row: tree.size for tree in TREES}
    longest = sorted(sizes.values(), reverse=True)
    ours = Batcher(TREES, batch_size=2, longest_first=4)
    plan = [batch for batch, _ in zip(ours, range(len(ours)), strict=False)]
    assert [sizes[row] for batch in plan[:2] for row in rows(batch)] == longest[:4]
    largest = sum(tree.size for tree in plan[0])
    assert largest >= max(sum(tree.size for tree in batch) for batch, _ in zip(ours, range(40), strict=False))
    assert ours.plan(1) == Batcher(TREES, batch_size=2).plan(1)
    packed = Batcher(TREES, tokens_per_batch=16, longest_first=1)
    assert max(tree.size for tree in packed.next()) == longest[0]


def test_how_steps_are_cut_into_batches_does_not_change_their_rows():
    def step(batch_size):
        return [row for batch in Batcher(TREES, batch_size=batch_size, longest_first=4).plan(0) for row in batch]

    assert step(1) == step(2) == step(4)


def test_order_without_shuffle():
    assert rows(Batcher(TREES, batch_size=4, shuffle=False).next()) == ["0", "1", "2", "3"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 80), st.integers(0, 9))
def test_packing_is_at_least_half_full(sizes, limit, seed):
    """No two batches of a window could be one."""
    trees = [Tree.sequence(list(range(size)), row=str(i)) for i, size in enumerate(sizes)]
    totals = sorted(sum(sizes[i] for i in batch) for batch in Batcher(trees, tokens_per_batch=limit, seed=seed).plan(0))
    assert sum(totals) == sum(sizes)
    assert len(totals) < 2 or totals[0] + totals[1] > limit


def test_state_of_other_settings_is_refused():
    with pytest.raises(ValueError, match="seed"):
        Batcher(TREES, seed=1).load_state(Batcher(TREES, seed=2).state())
    with pytest.raises(ValueError, match="count"):
        Batcher(TREES).load_state(Batcher(TREES[:5]).state())


def test_source_weights_say_how_often_rows_come(write, tokenizer):
    often = write(*({"text": f"often {i}"} for i in range(4)), name="often.jsonl")
    half = write(*({"text": f"half {i}"} for i in range(10)), name="half.jsonl")
    data = load_dataset([{"path": often, "weight": 2}, {"path": half, "weight": 0.5}], tokenizer)
    batcher = Batcher(data)
    epochs = []
    for _ in range(2):
        seen = Counter(batcher.next()[0].row.split("/")[-1] for _ in range(len(batcher)))
        batcher.epoch, batcher.index = batcher.epoch + 1, 0
        epochs.append(seen)
        assert {count for row, count in seen.items() if row.startswith("often")} == {2}
        assert sum(count for row, count in seen.items() if row.startswith("half")) == 5
    assert epochs[0] != epochs[1]


def test_step_denominators_count_targets_not_rows(write, tokenizer):
    """Packed or alone, the targets of the step are the same."""
    data = load_dataset(write(*({"text": "word " * n} for n in (3, 9, 27))), tokenizer)
    alone = sum(len(Forest([tree]).targets) for tree in data.trees)
    assert len(Forest(list(data.trees)).targets) == alone == data.report.trained
