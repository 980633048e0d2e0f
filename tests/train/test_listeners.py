"""Those who listen to a run: a failing one is told of and never ends it."""

from __future__ import annotations

import signal
import threading

import pytest

from longtune.config import load_config
from longtune.train import train
from longtune.train.events import EventLog
from longtune.train.stop import Stopper
from longtune.watch import read_events as read_log
from tests.tiny_run import read_events, write_config, write_model, write_rows


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model, data = write_model(folder / "model"), write_rows(folder / "data")
    return write_config(
        folder / "run.yaml", model, data, folder / "run", steps=3, eval_every=0, save_every=0, accumulate=1
    )


def test_an_exception_in_on_event_is_one_warning_with_a_traceback_and_the_run_goes_on(config, tmp_path, capsys):
    calls = []

    def broken(event):
        calls.append(event["event"])
        if event["event"] == "train":
            raise KeyError("margin")

    run = train(load_config(config, [f"output={tmp_path / 'run'}"]), broken)
    assert run.metrics["status"] == "done"
    (warning,) = [event for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    assert "on_event failed at the event train (KeyError: 'margin')" in warning["reason"]
    assert calls.count("train") == 3, "it still gets what comes"
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_tracker_that_fails_gets_nothing_more_and_others_do(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl")
    got, other = [], []

    def tracker(event):
        got.append(event["event"])
        raise ConnectionError("no route to host")

    log.listen(tracker, "tracker wandb", once=True)
    log.listen(lambda event: other.append(event["event"]))
    log.emit("meta")
    log.emit("train", step=1)
    log.close()
    assert got == ["meta"]
    assert other == ["meta", "warning", "train"]
    assert "tracker wandb failed" in read_log(tmp_path / "metrics.jsonl")[1]["reason"]


def test_what_a_listener_does_to_an_event_stays_with_it(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl")
    other = []

    def taking(event):
        kind = event.pop("event")
        event.clear()
        if kind == "train":
            raise KeyError("loss")

    log.listen(taking)
    log.listen(lambda event: other.append((event["event"], event.get("step"))))
    assert log.emit("train", step=1)["step"] == 1
    log.close()
    assert other == [("train", 1), ("warning", 1)]
    assert [event["event"] for event in read_log(tmp_path / "metrics.jsonl")] == ["train", "warning"]


def test_cancel_can_be_set_by_the_listener_itself(config, tmp_path):
    cancel = threading.Event()
    overrides = [f"output={tmp_path / 'run'}"]
    run = train(load_config(config, overrides), lambda event: cancel.set(), cancel=cancel)
    assert (run.reason, run.step) == ("cancelled", 0)
    assert train(load_config(config, overrides), resume=True).metrics["status"] == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_remembered_and_every_handler_put_back(number):
    before = signal.getsignal(number)
    with Stopper() as stopper:
        assert stopper.reason is None
        signal.raise_signal(number)
        assert stopper.reason == number.name
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the second leaves at once"
    assert signal.getsignal(number) is before


def test_a_terminal_that_goes_away_under_nohup_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper() as stopper:
            signal.raise_signal(signal.SIGHUP)
            assert stopper.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)
