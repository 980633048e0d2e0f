"""Columns, buckets and smoothing: no spike is lost, no gap is filled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtune.watch.series import MOST_COLUMNS, Buckets, Table, smooth

values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=200)


def table(numbers):
    made = Table()
    for step, number in enumerate(numbers, start=1):
        made.append(step, {"loss": number})
    return made


@given(values, st.integers(2, 50))
def test_buckets_hold_the_lowest_the_highest_and_the_mean_of_every_value(numbers, points):
    made = table(numbers)
    found = made.buckets("loss", points)
    known = [number for number in numbers if number is not None]
    assert len(found.step) <= points
    if not known:
        assert not np.isfinite(found.mean).any()
        return
    assert np.nanmin(found.low) == min(known)
    assert np.nanmax(found.high) == max(known)
    assert np.all((found.low <= found.mean + 1e-6) & (found.mean <= found.high + 1e-6) | np.isnan(found.mean))
    assert np.all(np.diff(found.step) > 0)


def test_a_spike_survives_among_100_000_steps():
    numbers = np.ones(100_000)
    numbers[70_000] = 50.0
    found = Buckets.of(np.arange(100_000.0), numbers, 300)
    assert len(found.step) == 300
    assert found.high.max() == 50.0
    assert found.high[209] == found.high[211] == 1.0


def test_a_range_is_seen_in_full_detail():
    steps = np.arange(1.0, 1001.0)
    found = Buckets.of(steps, steps, 50, first=101, last=120)
    assert found.step.tolist() == list(range(101, 121))
    assert len(Buckets.of(steps, steps, 50, first=5000, last=6000).step) == 0
    assert len(Buckets.of(np.empty(0), np.empty(0), 50).step) == 0


def test_a_metric_that_comes_later_and_one_that_goes_away_have_gaps():
    made = Table()
    made.append(1, {"a": 1.0})
    made.append(2, {"a": None, "b": 2})
    made.append(3, {"b": 3.0, "text": "no", "yes": True, "list": [1]})
    assert made.names == ["a", "b"]
    np.testing.assert_array_equal(made.column("a"), [1, math.nan, math.nan])
    np.testing.assert_array_equal(made.column("b"), [math.nan, 2, 3])
    assert (made.last("a"), made.last("b"), made.last("none")) == (None, 3.0, None)


def test_cutting_takes_out_the_steps_after():
    made = table([1.0, 2.0, 3.0])
    made.cut(2)
    assert made.steps().tolist() == [1, 2]
    made.append(3, {"loss": 9.0})
    assert made.column("loss").tolist() == [1, 2, 9]
    made.cut(0)
    assert len(made) == 0
    assert made.last("loss") is None


def test_a_broken_file_cannot_fill_the_memory_with_columns():
    made = Table()
    for step in range(100):
        made.append(step, {f"metric {step}": 1.0})
    assert len(made.names) == MOST_COLUMNS


def test_numbers_beyond_every_double_are_gaps():
    made = table([10**400, 1.0, float("inf")])
    assert np.isnan(made.buckets("loss", 10).mean[[0, 2]]).all()


def test_rounded_values_are_json_and_short():
    found = Buckets.of(np.arange(3.0), np.array([1 / 3, math.nan, 2.0]), 10).rounded()
    assert found == {"step": [0.0, 1.0, 2.0], "mean": [0.333333, None, 2.0]}
    spread = Buckets.of(np.arange(4.0), np.array([1.0, 3.0, 5.0, 7.0]), 2).rounded()
    assert spread == {"step": [0.5, 2.5], "mean": [2.0, 6.0], "low": [1.0, 5.0], "high": [3.0, 7.0]}


def test_smoothing_is_debiased_and_keeps_gaps():
    np.testing.assert_allclose(smooth(np.full(5, 3.0), 0.9), 3.0)
    found = smooth(np.array([math.nan, 1.0, math.nan, 2.0]), 0.5)
    np.testing.assert_allclose(found, [math.nan, 1.0, math.nan, (0.25 * 1 + 0.5 * 2) / 0.75])
    np.testing.assert_array_equal(smooth(np.array([1.0, 5.0]), 0.0), [1.0, 5.0])


@pytest.mark.parametrize("count", [1, 2])
def test_one_step_is_enough(count):
    found = table([2.0] * count).buckets("loss", 1)
    assert found.mean.tolist() == [2.0]
