"""Watching on a terminal and off: keys, plain lines, attaching and detaching for real."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

from longtune.watch import terminal
from longtune.watch.runs import ReplayedRun, WatchedRun
from longtune.watch.screen import Options
from longtune.watch.terminal import follow, press, speaks_unicode, watch
from tests.watch.logs import checkpoint, held, lines, meta, run_events, train, write_run


def watched(folder, events=None):
    return WatchedRun(write_run(folder, events))


def followed(runs, sleep=lambda _: pytest.fail("it should have been over"), width=100):
    out = io.StringIO()
    follow(runs, Console(file=out, width=width, highlight=False), sleep=sleep)
    return out.getvalue()


def test_keys_change_what_is_seen(tmp_path):
    runs = [watched(tmp_path / "a"), watched(tmp_path / "b", run_events(30, pairs=True))]
    for run in runs:
        run.refresh()
    options = Options()
    for key in "mm":
        assert press(key, options, runs)
    assert options.chart == 2
    assert press("M", options, runs)
    assert options.chart == 1
    for _ in range(6):
        press("m", options, runs)
    assert options.chart == 0
    seen = []
    for _ in range(4):
        press("s", options, runs)
        seen.append(options.smoothing)
    assert seen == [0.97, 0.0, 0.6, 0.9]
    press("l", options, runs)
    assert options.log
    press("n", options, runs)
    assert (options.compare, options.selected) == (False, 1)
    press("c", options, runs)
    assert options.compare
    assert press("\x1b", options, runs)
    assert press("?", options, runs)
    assert not press("q", options, runs)


def test_off_a_terminal_a_finished_run_is_told_in_lines(tmp_path):
    told = followed([watched(tmp_path / "run", run_events(1000))])
    assert told.isascii()
    rows = told.splitlines()
    assert rows[0].startswith("sft on smollm2")
    assert 100 <= sum(row.startswith("step ") and "lr" in row for row in rows) <= 102
    assert rows[-2].startswith("done: 1,000 steps")
    assert "answered 2 sample prompts" in told


def test_several_runs_are_told_apart(tmp_path):
    told = followed([watched(tmp_path / "a", run_events(5)), watched(tmp_path / "b", run_events(3))])
    assert {row.partition(":")[0] for row in told.splitlines()} == {"a", "b"}


def test_lines_come_as_the_run_writes_them_until_its_end(tmp_path):
    events = run_events(20)
    run = WatchedRun(write_run(tmp_path / "run", events[:5]))
    waiting = [events[5:9], events[9:]]

    def sleep(_):
        with (tmp_path / "run" / "metrics.jsonl").open("ab") as out:
            out.write(lines(waiting.pop(0)))

    with held(tmp_path / "run"):
        told = followed([run], sleep)
    assert not waiting
    assert "step 20/20" in told


def test_an_alert_is_told_once_and_ends_a_run_that_was_killed(tmp_path):
    told = followed([watched(tmp_path / "run", [meta(9), train(1), checkpoint(1)])])
    assert told.count("no process writes this run any more") == 1


def test_what_a_run_says_steers_no_terminal(tmp_path):
    events = [meta(3, model="\x1b[2Jx"), {"event": "warning", "step": 0, "reason": "\x1b]0;t\x07", "t": 1.8e9}]
    told = followed(
        [watched(tmp_path / "run", [*events, train(1), {"event": "failed", "step": 1, "reason": "\x1b[5m"}])]
    )
    assert "\x1b" not in told
    assert "\x07" not in told


def test_a_replay_is_told_in_lines_too(tmp_path):
    clock = [0.0]
    run = ReplayedRun(write_run(tmp_path / "run", run_events(10)), 1.0, clock=lambda: clock[0])

    def sleep(_):
        clock[0] += 5.0

    assert "done: 10 steps" in followed([run], sleep)


def test_a_dumb_terminal_gets_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    watch([watched(tmp_path / "run", run_events(5))], Console(file=out, force_terminal=True, width=80))
    assert "\x1b" not in out.getvalue()
    assert "done: 5 steps" in out.getvalue()


def test_braille_needs_an_encoding_and_a_terminal_that_has_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert speaks_unicode(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8")))
    assert not speaks_unicode(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="latin-1")))
    monkeypatch.setenv("TERM", "linux")
    assert not speaks_unicode(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8")))


class Attached:
    """`longtune watch` on a terminal of its own."""

    def __init__(self, *arguments, **environment):
        self.main, side = pty.openpty()
        # The terminal becomes the process's own, so that Ctrl-C reaches it as a signal.
        code = (
            "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            "from longtune.cli import app; app(sys.argv[1:])"
        )
        size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "watch", *map(str, arguments)],
            stdin=side,
            stdout=side,
            stderr=side,
            env={**os.environ, **size, **environment},
            start_new_session=True,
        )
        os.close(side)
        self.seen = ""

    def until(self, wanted, seconds=60.0):
        end = time.monotonic() + seconds
        while wanted not in self.seen:
            assert time.monotonic() < end, f"never seen: {wanted!r} in {self.seen[-2000:]!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.seen += os.read(self.main, 1 << 16).decode(errors="replace")

    def resize(self, rows, columns):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys):
        self.seen = ""
        os.write(self.main, keys.encode())

    def left(self):
        end = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.main], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.main, 1 << 16).decode(errors="replace")
                except OSError:
                    break
        if self.process.poll() is None:
            self.process.kill()
        os.close(self.main)
        return self.process.wait()


def test_attaching_following_and_detaching_leave_the_run_alone(tmp_path):
    run = write_run(tmp_path / "run", run_events(100, upto=40))
    with held(run):
        screen = Attached(run)
        screen.until("40/100")
        screen.until("q detach")
        assert "\x1b[?1049h" in screen.seen, "a screen of its own, so that the old one comes back"
        with (run / "metrics.jsonl").open("ab") as out:
            out.write(lines([train(41)]))
        screen.until("41/100")
        screen.press("m")
        screen.until("learning rate")
        before = (run / "metrics.jsonl").read_bytes()
        screen.press("q")
        assert screen.left() == 0
        assert "\x1b[?1049l" in screen.seen
    assert (run / "metrics.jsonl").read_bytes() == before
    assert sorted(file.name for file in run.iterdir()) == [
        ".lock",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "plan.json",
    ]


def test_a_terminal_that_changes_its_size_is_filled_anew(tmp_path):
    screen = Attached(write_run(tmp_path / "run"), COLUMNS="", LINES="")
    screen.resize(24, 80)
    screen.until("q detach")
    screen.seen = ""
    screen.resize(40, 130)
    # A bar that 80 columns have no room for.
    screen.until("━" * 70)
    screen.press("q")
    assert screen.left() == 0


def test_ctrl_c_detaches_too(tmp_path):
    screen = Attached(write_run(tmp_path / "run"), "--ascii", NO_COLOR="1")
    screen.until("100/100")
    screen.press("\x03")
    assert screen.left() == 0
    assert screen.seen.isascii()
    assert not any(f"\x1b[{code}m" in screen.seen for code in (31, 32, 33, 36))


def test_watchers_give_way():
    code = "from longtune.watch.terminal import _give_way; import os; _give_way(); print(os.nice(0))"
    given = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    assert int(given) == min(19, os.nice(0) + 10)
    assert terminal.INTERVAL >= 1.0


def test_pictures_take_less_than_a_thousandth_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert terminal.resting(0.007) == pytest.approx(5.0)
    assert terminal.resting(0.0001) == terminal.INTERVAL
    assert terminal.resting(9.0) == terminal.SLOWEST
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert terminal.resting(0.010) == terminal.INTERVAL
