"""What a run's events say: pure functions of the events, on a terminal and off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from longtune.watch import ProgressLine, View, read_events
from longtune.watch.view import duration, event_lines, number, pairs, size

META = {
    "event": "meta",
    "method": "sft",
    "model": "smollm2",
    "device": "cpu",
    "dtype": "float32",
    "data": ["9 rows of chat"],
    "steps": 200,
    "rows": 9,
    "tokens": 1234,
    "trained_tokens": 567,
    "valid_rows": 3,
    "trainable_parameters": 4096,
    "folder": "/runs/a",
}


def step(number, seconds=2.0, **changes):
    return {
        "event": "train",
        "step": number,
        "loss": 1.23456,
        "grad_norm": 0.5,
        "learning_rate": 2e-4,
        "tokens_per_second": 1234.5,
        "seconds": seconds,
        **changes,
    }


def test_the_line_shows_step_loss_rate_norm_speed_and_what_is_left():
    view = View()
    view.update(META)
    view.update(step(20))
    assert view.progress_line() == "step 20/200  loss 1.2346  lr 2.0e-04  norm 0.5  1,234 tok/s  ETA 6:00"
    assert len(view.progress_line()) < 80


def test_pairs_show_how_many_are_right_and_the_margin():
    view = View()
    view.update(META)
    pair = {"pairs": 8.0, "correct": 5.0, "margin": 0.12345}
    view.update(step(20, **pair))
    assert "loss 1.2346  acc 5/8  margin 0.123  lr" in view.progress_line()
    assert len(view.progress_line()) < 110
    event = {"event": "validation", "step": 3, "loss": 0.5, "rows": 9, "trained_tokens": 99, "seconds": 1.0, **pair}
    assert "validation loss 0.5  acc 5/8  margin 0.123  (9 rows" in event_lines(event)[0]
    assert "acc 0/8 (8 tied)  margin" in pairs({**pair, "correct": 0.0, "ties": 8.0})
    assert "acc 5/8  margin" in pairs({**pair, "ties": 0.0})
    told = {"event": "reference", "step": 0, "split": "train", "rows": 9, "done": 9, "seconds": 61.0, "path": "/c"}
    assert "9 of 9 rows of train, 4 computed in 1:01, kept in /c" in event_lines({**told, "computed": 4})[0]
    assert "all from /c" in event_lines({**told, "computed": 0})[0]


def test_the_remaining_time_follows_recent_steps():
    view = View()
    view.update(META)
    assert view.remaining is None
    for number_ in range(1, 101):
        view.update(step(number_, seconds=100.0 if number_ < 50 else 1.0))
    assert view.remaining == pytest.approx(100.0)


def test_a_resumed_run_goes_on_counting():
    view = View()
    view.update({"event": "resumed", "step": 100, "steps": 200, "checkpoint": "c"})
    assert view.progress_line() == "step 100/200"


def test_numbers_that_are_not_finite_are_shown():
    view = View()
    view.update(META)
    view.update(step(1, loss=None, grad_norm=float("inf")))
    assert "loss nan" in view.progress_line()
    assert "norm inf" in view.progress_line()


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (0.2, "0:00"), (65, "1:05"), (3661, "1:01:01")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_sizes_and_numbers():
    assert size(3 * 2**29) == "1.50 GiB"
    assert size(2**20) == "1 MiB"
    assert number(0.000012345) == "1.2345e-05"


def test_off_a_terminal_there_are_plain_lines_and_not_one_for_every_step():
    out = io.StringIO()
    with ProgressLine(Console(file=out, width=80)) as progress:
        progress({**META, "steps": 1000})
        for number_ in range(1, 1001):
            progress(step(number_))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert 100 <= sum(line.startswith("step ") for line in lines) <= 102
    assert lines[-1].startswith("step 1000/1000")


def test_on_a_terminal_the_line_is_overwritten():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, color_system=None)
    with ProgressLine(console) as progress:
        progress(META)
        for number_ in range(1, 4):
            progress(step(number_))
    text = out.getvalue()
    assert "\x1b[2K" in text or "\r" in text
    assert text.count("\n") < 12


def test_brackets_in_a_row_are_no_markup():
    out = io.StringIO()
    with ProgressLine(Console(file=out, width=200)) as progress:
        progress({"event": "warning", "step": 1, "reason": "odd", "rows": ["a[red].jsonl:3"]})
    assert "a[red].jsonl:3" in out.getvalue()


def test_every_event_that_ends_a_run_is_said():
    done = {"event": "done", "step": 3, "seconds": 9.0, "tokens_per_second": None, "peak_bytes": 2**30, "adapter": "x"}
    assert "3 steps" in event_lines(done)[0]
    assert "--resume" in event_lines({"event": "stopped", "step": 3, "reason": "SIGINT"})[0]
    assert "nan" in event_lines({"event": "failed", "step": 3, "reason": "the loss is nan"})[0]
    assert event_lines({"event": "of a newer version"}) == []


def test_a_log_reads_as_if_the_run_had_never_been_interrupted(tmp_path):
    log = tmp_path / "metrics.jsonl"
    kinds = [("meta", None), ("train", 1), ("train", 2), ("checkpoint", 2), ("train", 3), ("failed", 3)]
    kinds += [("resumed", 2), ("train", 3), ("train", 4), ("done", 4)]
    lines = [f'{{"event":"{kind}"' + (f',"step":{at}}}' if at else "}") for kind, at in kinds]
    lines.insert(6, '{"event":"tra')
    log.write_text("\n".join(lines) + "\n")
    read = [(event["event"], event.get("step")) for event in read_events(log)]
    assert read == [kinds[i] for i in (0, 1, 2, 3, 6, 7, 8, 9)]


def test_one_of_a_thing_is_not_several():
    one = {**META, "steps": 1, "epochs": 1.0, "seen_rows": 1, "seen_tokens": 1, "valid_rows": 1}
    assert "1 step, 1 epoch: 1 row, 1 token; 1 row of validation" in event_lines(one)
    assert "0.25 epochs: 1 row," in event_lines({**one, "epochs": 0.25})[-2]


def test_counts_of_an_older_log_are_those_of_its_data():
    assert any("9 rows, 1,234 tokens; 3 rows of validation" in line for line in event_lines(META))


def test_a_resumed_run_says_what_has_changed():
    event = {"event": "resumed", "step": 4, "steps": 8, "checkpoint": "/c", "changed": ["train.save_every: 2, now 3"]}
    assert event_lines(event) == ["resumed from /c", "changed since: train.save_every: 2, now 3"]
