"""Learning-rate schedules: warm-up, the shape after it, and no dependence on anything but the step."""

from __future__ import annotations

import pytest

from longtune.train.schedule import FLOOR, factor, warmup_length


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warm_up_rises_evenly_to_the_full_rate_and_no_step_is_idle(name):
    rates = [factor(name, step, 20, 4) for step in range(1, 6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays_constant_after_warm_up():
    assert {factor("constant", step, 20, 4) for step in range(5, 21)} == {1.0}


def test_linear_falls_in_equal_parts_towards_zero():
    rates = [factor("linear", step, 10, 0) for step in range(1, 11)]
    assert rates == pytest.approx([1 - step / 10 for step in range(10)])


def test_cosine_falls_to_its_floor():
    rates = [factor("cosine", step, 1000, 0) for step in range(1, 1001)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert rates[500] == pytest.approx((1 + FLOOR) / 2, abs=1e-3)
    assert rates[-1] == pytest.approx(FLOOR, abs=1e-4)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_run_of_one_step_learns(name, warmup):
    assert factor(name, 1, 1, warmup) > 0


def test_warmup_steps_win_over_the_ratio():
    assert warmup_length(200, 0.03, None) == 6
    assert warmup_length(60, 0.03, None) == 2
    assert warmup_length(200, 0.03, 0) == 0
    assert warmup_length(5, 0.0, 100) == 5
