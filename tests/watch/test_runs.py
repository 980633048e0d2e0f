"""Finding runs, knowing who writes them, and playing them again."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from longtune.errors import UserError
from longtune.watch import runs as room
from longtune.watch.runs import ReplayedRun, WatchedRun, choose_runs, find_runs, holder, short_names
from tests.watch.logs import held, lines, long_log, meta, run_events, train, write_run

LOCKS_LISTED = os.path.exists("/proc/locks")


def aged(folder, seconds):
    when = time.time() - seconds
    os.utime(folder / "metrics.jsonl", (when, when))
    return folder


def test_runs_are_found_newest_first_and_not_inside_runs_or_hidden_folders(tmp_path):
    old = aged(write_run(tmp_path / "runs" / "old"), 100)
    new = aged(write_run(tmp_path / "runs" / "group" / "new"), 10)
    write_run(tmp_path / ".hidden" / "a")
    write_run(old / "inner")
    write_run(tmp_path / "1/2/3/4/5/deep")
    assert find_runs(tmp_path) == [new, old]
    assert find_runs(old) == [old]


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    outside = write_run(tmp_path / "outside")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "run").mkdir()
    (root / "run" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    inside = write_run(root / "inside")
    assert find_runs(root) == [inside]


def test_a_circle_of_links_ends(tmp_path):
    run = write_run(tmp_path / "a" / "run")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert run in find_runs(tmp_path)


def test_a_search_ends_in_a_folder_of_very_many(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "MOST_FOLDERS", 10)
    for number in range(30):
        (tmp_path / f"{number:02}").mkdir()
    write_run(tmp_path / "00")
    assert len(find_runs(tmp_path)) == 1


def test_the_newest_run_is_chosen_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="holds no run yet"):
        choose_runs([])
    aged(write_run(tmp_path / "runs" / "old"), 100)
    new = write_run(tmp_path / "runs" / "new")
    assert choose_runs([]) == [new]
    assert choose_runs([tmp_path / "runs"]) == [new]
    assert choose_runs([tmp_path / "runs" / "old", new, new])[1:] == [new]


def test_every_name_that_leads_to_no_run_is_told(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        choose_runs([tmp_path / "empty", tmp_path / "nowhere"])
    assert [problem.reason for problem in caught.value.problems] == ["holds no run", "there is no such folder"]


def test_a_run_that_has_written_nothing_yet_can_be_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (chosen,) = choose_runs([tmp_path / "run"])
    run = WatchedRun(chosen)
    run.refresh()
    assert run.status == "starting"
    assert run.facts()["step"] == 0


def test_names_are_as_short_as_they_can_be(tmp_path):
    names = short_names([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"])
    assert names == ["a/run", "b/run", "other"]


@pytest.mark.skipif(not LOCKS_LISTED, reason="the system lists no locks")
def test_the_writer_is_the_process_that_holds_the_lock(tmp_path):
    run = write_run(tmp_path / "run")
    assert holder(run) == room.Holder(False)
    with held(run):
        assert holder(run) == room.Holder(True, os.getpid())
        with held(write_run(tmp_path / "other")):
            assert holder(run).pid == os.getpid()
    assert holder(run) == room.Holder(False)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert holder(run) == room.Holder(True, other.pid)
        other.communicate(b"\n")
    assert holder(run) == room.Holder(False)


def test_watching_never_takes_the_lock(tmp_path):
    """A run must be able to start while it is looked at."""
    run = write_run(tmp_path / "run", run_events(100, upto=10))
    watched = WatchedRun(run)
    with held(run):
        before = (run / ".lock").stat()
        for _ in range(3):
            watched.refresh()
        assert (run / ".lock").stat() == before


def test_without_a_list_of_locks_nobody_is_said_to_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_LOCKS", tmp_path / "none")
    run = write_run(tmp_path / "run", run_events(100, upto=10))
    assert holder(run) == room.Holder(None)
    watched = WatchedRun(run)
    watched.now = lambda: watched.state.last_t or 0.0
    watched.refresh()
    assert watched.status == "running"


@pytest.mark.skipif(not LOCKS_LISTED, reason="the system lists no locks")
def test_a_growing_run_is_followed_to_its_end(tmp_path):
    events = run_events(50)
    run = write_run(tmp_path / "run", events[:30])
    watched = WatchedRun(run)
    with held(run):
        assert watched.refresh()
        assert not watched.refresh()
        watched.now = lambda: watched.state.last_t
        watched.refresh()
        assert watched.status == "running"
        assert watched.facts()["pid"] == os.getpid()
        with (run / "metrics.jsonl").open("ab") as out:
            rest = lines(events[30:])
            out.write(rest[:100])
            out.flush()
            watched.refresh()
            out.write(rest[100:])
        assert watched.refresh()
    assert watched.status == "done"
    facts = watched.facts()
    assert (facts["step"], facts["eta_seconds"], facts["predicted_peak_bytes"]) == (50, 0.0, 2**31)
    assert facts["peak_bytes"] == 2**30 + 50 * 2**20
    assert isinstance(facts["peak_bytes"], int)


def test_a_log_that_starts_anew_leaves_nothing_of_the_old_one(tmp_path):
    run = write_run(tmp_path / "run", run_events(50))
    watched = WatchedRun(run)
    watched.refresh()
    (run / "metrics.jsonl").write_bytes(lines([meta(7), train(1)]))
    assert watched.refresh()
    assert (watched.state.step, watched.state.steps, watched.state.end) == (1, 7, None)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null"])
def test_broken_files_beside_the_log_are_as_if_missing(tmp_path, content):
    run = write_run(tmp_path / "run")
    (run / "plan.json").write_bytes(content)
    watched = WatchedRun(run)
    watched.refresh()
    assert watched.facts()["predicted_peak_bytes"] is None


def test_files_that_lead_out_of_the_run_are_not_read(tmp_path):
    run = write_run(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text('{"secret": 1}')
    for name in ("config.yaml", "plan.json"):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    watched = WatchedRun(run)
    assert watched.text("config.yaml") == ""
    assert watched.json("plan.json") is None


def test_the_size_of_the_newest_checkpoint_is_known(tmp_path):
    run = write_run(tmp_path / "run", run_events(100, upto=60))
    saved = run / "checkpoints" / "step-00050"
    saved.mkdir(parents=True)
    (saved / "adapter").write_bytes(bytes(1000))
    watched = WatchedRun(run)
    watched.refresh()
    assert watched.surroundings.checkpoint_bytes == 1000


def test_a_finished_run_plays_again_in_its_own_time(tmp_path):
    run = write_run(tmp_path / "run", run_events(100))
    clock = [0.0]
    replayed = ReplayedRun(run, 10.0, clock=lambda: clock[0])
    assert replayed.refresh()
    assert (replayed.state.step, replayed.status) == (0, "starting")
    clock[0] = 10.0
    assert replayed.refresh()
    assert (replayed.state.step, replayed.status) == (50, "running")
    assert replayed.facts()["eta_seconds"] == pytest.approx(100.0, rel=0.05)
    assert not replayed.alerts
    clock[0] = 100.0
    replayed.refresh()
    assert replayed.status == "done"
    assert replayed.finished


def test_a_replay_leaves_out_the_night_between_stop_and_resume(tmp_path):
    events = run_events(10, upto=5)
    night = events[-1]["t"] + 40_000
    events.append({"event": "resumed", "step": 5, "steps": 10, "checkpoint": None, "t": night})
    events += [train(step, t=night + 2 * (step - 5)) for step in range(6, 11)]
    clock = [0.0]
    replayed = ReplayedRun(write_run(tmp_path / "run", events), 1.0, clock=lambda: clock[0])
    clock[0] = 21.0
    replayed.refresh()
    assert replayed.finished


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system doesn't tell a process's peak")
def test_100_000_lines_are_read_quickly_and_in_little_memory(tmp_path):
    long_log(tmp_path / "metrics.jsonl", 100_000)
    code = """
import sys, time
from pathlib import Path
from longtune.watch.runs import WatchedRun
from longtune.watch.screen import Options, screen
start = time.process_time()
run = WatchedRun(Path(sys.argv[1]))
run.refresh()
screen([run], Options(), 200, 50)
print(run.state.step, time.process_time() - start)
# The kernel's other figure counts the parent's memory at the fork.
print(next((line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), 0))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    step, seconds, kilobytes = (float(word) for word in told.split())
    assert step == 100_000
    assert seconds < 4.0
    assert kilobytes < 200_000
    # What comes after is read alone.
    run = WatchedRun(tmp_path)
    run.refresh()
    with (tmp_path / "metrics.jsonl").open("ab") as out:
        out.write(lines([train(100_001)]))
    start = time.process_time()
    assert run.refresh()
    assert time.process_time() - start < 0.1
    assert run.state.step == 100_001
