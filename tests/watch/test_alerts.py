"""What is worth an alert, and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from longtune.watch.alerts import GIB, Surroundings, find_alerts, rising, status_of
from tests.watch.logs import T0, checkpoint, done, meta, run_events, train, validation
from tests.watch.test_state import fed


def kinds(events, **around):
    state = fed(events)
    found = find_alerts(state, Surroundings(**{"now": state.last_t or 0.0, "held": True, **around}))
    return [alert.kind for alert in found]


def test_a_run_that_goes_well_has_none():
    assert kinds(run_events(100, upto=60), free_bytes=100 * GIB, predicted={"peak_bytes": 2 * GIB}) == []
    assert kinds(run_events(100), held=False) == []


def test_a_process_that_is_gone_is_told_with_the_way_on():
    state = fed([*run_events(100, upto=60)])
    around = Surroundings(now=state.last_t, held=False)
    assert status_of(state, around) == "gone"
    assert "step 50 with --resume" in find_alerts(state, around)[0].text
    assert "no checkpoint" in find_alerts(fed([meta(9), train(1)]), around)[0].text


def test_a_failed_run_says_why():
    events = [meta(9), train(1), {"event": "failed", "step": 1, "reason": "the loss is nan", "t": T0 + 3}]
    state = fed(events)
    (alert,) = find_alerts(state, Surroundings(now=T0 + 3, held=False))
    assert alert.as_dict() == {"level": "error", "kind": "failed", "text": "failed at step 1: the loss is nan"}


def test_a_stall_is_a_silence_much_longer_than_those_before_while_the_lock_is_held():
    events = run_events(100, upto=60)
    last = fed(events).last_t
    assert kinds(events, now=last + 59) == []
    assert kinds(events, now=last + 61) == ["stalled"]
    slow = [meta(100), *(train(step, t=T0 + 300 * step) for step in range(1, 9))]
    assert kinds(slow, now=T0 + 2400 + 2000) == []
    assert kinds(slow, now=T0 + 2400 + 2500) == ["stalled"]
    # Loading a large model and reading its data takes long.
    assert kinds([meta(9)], now=T0 + 1000) == []
    assert kinds([meta(9)], now=T0 + 2000) == ["stalled"]
    assert kinds(run_events(20), now=last + 10_000) == []


def test_where_nobody_knows_the_writer_silence_is_told():
    state = fed(run_events(100, upto=60))
    around = Surroundings(now=state.last_t + 500, held=None)
    assert status_of(state, around) == "silent"
    assert [alert.kind for alert in find_alerts(state, around)] == ["stalled"]


def test_a_stopped_run_that_loads_again_is_starting():
    state = fed([meta(9), train(1), {"event": "stopped", "step": 1, "reason": "SIGTERM", "t": T0 + 3}])
    assert status_of(state, Surroundings(now=T0 + 4, held=True)) == "stopped"
    assert status_of(state, Surroundings(now=T0 + 60, held=False)) == "stopped"
    assert status_of(state, Surroundings(now=T0 + 60, held=True)) == "starting"
    ended = fed([meta(1), train(1), done(1)])
    assert status_of(ended, Surroundings(now=T0 + 60, held=True)) == "done"


def test_numbers_that_are_not_finite_are_told_with_the_last_step():
    events = [meta(9), train(1), {**train(2), "loss": None}, train(3)]
    assert kinds(events) == ["nonfinite"]
    assert "step 2" in find_alerts(fed(events), Surroundings(held=True))[0].text


@pytest.mark.parametrize(
    "free, saved, told", [(2 * GIB, 0, False), (GIB - 1, 0, True), (5 * GIB, 3 * GIB, True), (None, 0, False)]
)
def test_the_disk_must_hold_two_more_checkpoints(free, saved, told):
    events = [meta(9), train(1), checkpoint(1)]
    assert kinds(events, free_bytes=free, checkpoint_bytes=saved) == (["disk"] if told else [])


def noisy(means, seed=0, noise=0.1):
    return np.repeat(means, 40) + noise * np.random.default_rng(seed).standard_normal(40 * len(means))


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_rises_when_it_stays_above_its_lowest_by_more_than_noise(seed):
    assert rising(noisy([3.0, 2.0, 1.5, 1.2, 1.1, 1.05, 1.0, 1.0], seed)) is None
    assert rising(noisy([1.0] * 8, seed, noise=0.5)) is None
    low, recent = rising(noisy([3.0, 2.0, 1.0, 1.0, 1.0, 1.2, 1.5, 2.0], seed))
    assert low == pytest.approx(1.0, abs=0.1)
    assert recent > 1.5
    assert rising(np.array([1.0, 2.0, 9.0])) is None
    assert rising(np.full(100, np.nan)) is None


def test_one_odd_step_is_no_rise():
    losses = noisy([2.0, 1.5, 1.2, 1.1, 1.0])
    losses[-1] = 30.0
    assert rising(losses) is None


def test_a_validation_that_turns_is_told_with_its_best_step():
    events = [meta(9), train(1), validation(1, 2.0), validation(2, 1.0), validation(3, 1.2)]
    assert kinds(events) == ["validation"]
    assert "best 1 at step 2" in find_alerts(fed(events), Surroundings(held=True))[0].text
    assert kinds(events[:-1]) == []


def test_memory_above_the_plan():
    events = [meta(9), train(1, peak_bytes=int(1.2 * GIB))]
    assert kinds(events, predicted={"peak_bytes": GIB}) == ["memory"]
    assert kinds(events, predicted={"peak_bytes": int(1.19 * GIB)}) == []
    assert kinds(events, predicted={"peak_bytes": "much"}) == []


def test_errors_come_first():
    events = [meta(9), train(1, peak_bytes=2 * GIB), {**train(2, peak_bytes=2 * GIB), "loss": None}]
    assert kinds(events, predicted={"peak_bytes": GIB}) == ["nonfinite", "memory"]
