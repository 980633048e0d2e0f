"""A run's state as a pure function of its events, interrupted or not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtune.watch.log import clean, parse
from longtune.watch.state import KEPT_SAMPLES, RunState
from tests.watch.logs import T0, done, lines, meta, run_events, samples, train, validation


def fed(events):
    state = RunState()
    for event in events:
        state.update(event)
    return state


def told(state):
    return {
        # As text, because NaN is not equal to itself.
        "train": {name: str(state.train.column(name).tolist()) for name in ("loss", "seconds")},
        "steps": state.train.steps().tolist(),
        "validation": state.validation.steps().tolist(),
        "notes": list(state.notes),
        "samples": state.samples,
        "end": state.end,
        "nonfinite": state.nonfinite,
        "step": state.step,
    }


@st.composite
def broken_runs(draw):
    """Events of a run that is stopped, killed and resumed again and again."""
    events, step = [meta(50)], 0
    for _ in range(draw(st.integers(0, 4))):
        for _ in range(draw(st.integers(0, 6))):
            step += 1
            events.append(train(step, loss=draw(st.floats(0, 9))))
            if draw(st.booleans()):
                events.append({**train(step), "loss": None} if draw(st.booleans()) else validation(step))
            if draw(st.booleans()):
                events.append(samples(step, "x"))
        if draw(st.booleans()):
            events.append({"event": draw(st.sampled_from(["stopped", "failed", "done"])), "step": step, "t": T0})
        step = draw(st.integers(0, step))
        events.append({"event": "resumed", "step": step, "steps": 50, "checkpoint": None, "t": T0})
    return events


@given(broken_runs())
def test_a_resumed_run_is_the_same_as_its_cleaned_log(events):
    assert told(fed(events)) == told(fed(clean(events)))


def test_the_newest_values_and_the_best_validation():
    state = fed(run_events(100))
    assert (state.step, state.steps) == (100, 100)
    assert state.end["event"] == "done"
    assert state.remaining == 0.0
    assert state.best_validation == (100, pytest.approx(0.6 + 2.0 * np.exp(-100 / 30)))
    assert state.smoothed_loss == pytest.approx(0.6, abs=0.05)
    assert not state.has_pairs
    assert fed(run_events(30, pairs=True)).has_pairs


def test_the_remaining_time_counts_validation_and_follows_recent_steps():
    slow = [train(step, t=T0 + 100 * step) for step in range(1, 20)]
    fast = [train(step, t=T0 + 1900 + 3 * (step - 19)) for step in range(20, 81)]
    state = fed([meta(100), *slow])
    assert state.remaining == pytest.approx(81 * 100)
    for event in fast:
        state.update(event)
    # `seconds` of a step say 2: the third second is what happens between the steps.
    assert state.remaining == pytest.approx(20 * 3)


def test_a_pause_before_a_resume_counts_neither_as_work_nor_as_pace():
    events = [meta(10), train(1), train(2), {"event": "stopped", "step": 2, "reason": "SIGTERM", "t": T0 + 5}]
    night = T0 + 40_000
    events.append({"event": "resumed", "step": 2, "steps": 10, "checkpoint": "c", "t": night})
    events += [train(3, t=night + 2), train(4, t=night + 4)]
    state = fed(events)
    assert state.elapsed == pytest.approx(9.0)
    assert state.seconds_per_step == pytest.approx(2.0)
    assert max(state.gaps) < 10


def test_before_the_first_step_nothing_is_known():
    state = fed([])
    assert (state.remaining, state.elapsed, state.smoothed_loss, state.best_validation) == (None,) * 4
    state = fed([meta(10)])
    assert (state.step, state.steps, state.remaining) == (0, 10, None)
    assert fed([meta(10), train(1)]).remaining == pytest.approx(18.0)


@pytest.mark.parametrize(
    "event",
    [
        {"event": "train"},
        {"event": "train", "step": "7"},
        {"event": "train", "step": -1},
        {"event": "train", "step": 10**30},
        {"event": "train", "step": None, "loss": 1.0},
        {"event": "validation", "loss": "x"},
        {"event": "samples", "items": "none"},
        {"event": "of a newer version", "step": 3, "values": {}},
        {"event": "resumed"},
        {"event": "resumed", "step": "2"},
        {"event": "resumed", "step": None},
        {"event": "resumed", "step": -1},
        {"event": "meta", "steps": "many", "t": "now"},
        {"event": "checkpoint", "step": 2},
        {"event": "done"},
    ],
)
def test_a_foreign_event_breaks_nothing(event):
    events = [meta(10), train(1), event, train(2), {"event": "resumed", "step": 2}]
    state = fed(events)
    assert state.train.last("loss") is not None
    assert state.steps == 10
    assert told(fed(clean(events))) == told(state)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"3", b'{"event":3}', b'{"no":1}', b"\xff\xfe", b'"x"'])
def test_a_line_that_holds_no_event_is_none(line):
    assert parse(line) is None
    assert parse(b'{"event":"x"}') == {"event": "x"}


def test_samples_are_bounded_and_the_first_ones_stay():
    state = fed([meta(10), *(samples(step, "x") for step in range(1, 200))])
    assert len(state.samples) == KEPT_SAMPLES
    assert [event["step"] for event in (state.samples[0], state.samples[-1])] == [1, 199]


def test_events_that_come_many_times_a_step_push_nothing_out():
    phases = [{"event": "memory", "step": 2, "phase": "head", "t": T0} for _ in range(2000)]
    state = fed([meta(10), train(1), {"event": "checkpoint", "step": 1, "path": "c"}, *phases])
    assert [note["event"] for note in state.notes] == ["checkpoint"]


def test_steps_that_were_not_finite_are_counted():
    state = fed([meta(10), train(1), {**train(2), "loss": None}, {**train(3), "grad_norm": None}])
    assert state.nonfinite == [2, 3]


def test_lines_of_helpers_are_what_a_run_writes():
    events = run_events(30)
    assert [json.loads(line) for line in lines(events).splitlines()] == events
    assert done(3)["event"] == "done"
