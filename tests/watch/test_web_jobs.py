"""Starting and stopping runs from the page: real processes, one signal each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.tiny_run import write_config, write_model, write_rows
from tests.watch.logs import held, run_events, write_run

pytest.importorskip("starlette", reason="needs the extra web")

from starlette.testclient import TestClient

from longtune.watch.runs import holder
from longtune.watch.web import jobs as room
from longtune.watch.web.app import make_app
from longtune.watch.web.guard import Policy
from longtune.watch.web.jobs import Jobs, Refused
from longtune.watch.web.served import Served

WRITER = """
import fcntl, signal, sys, time
count = 0
def caught(*_):
    global count
    count += 1
    print("asked", count, flush=True)
signal.signal(signal.SIGTERM, caught)
file = open(sys.argv[1] + "/.lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
until = time.monotonic() + 30
while count < int(sys.argv[2]) and time.monotonic() < until:
    time.sleep(0.02)
print("left", flush=True)
"""


def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)
    return found


def test_a_run_is_asked_to_stop_once_whoever_started_it(tmp_path):
    run = write_run(tmp_path / "run", run_events(100, upto=10))
    jobs = Jobs(tmp_path)
    command = [sys.executable, "-c", WRITER, str(run), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        assert jobs.stop(run) == writer.pid
        assert writer.stdout.readline() == "asked 1\n"
        with pytest.raises(Refused, match="asked already"):
            jobs.stop(run)
        time.sleep(0.1)
        assert writer.poll() is None, "a second signal would have ended it"
        writer.send_signal(signal.SIGTERM)
        assert writer.stdout.readline() == "asked 2\n"
    with pytest.raises(Refused, match="no process"):
        jobs.stop(run)


def test_a_process_that_took_the_number_over_is_left_alone(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", run_events(3))
    answers = [room.holder(run), room.holder(run)]
    with held(run):
        answers[0] = holder(run)
    monkeypatch.setattr(room, "holder", lambda _: answers.pop(0))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: pytest.fail("signalled"))
    monkeypatch.setattr(room.os, "kill", lambda *_: pytest.fail("signalled"))
    with pytest.raises(Refused, match="just ended"):
        Jobs(tmp_path).stop(run)


def test_what_a_process_prints_and_how_it_ends_is_shown(tmp_path):
    jobs = Jobs(tmp_path, command=(sys.executable, "-c", "import sys; print('said', sys.argv[1:]); sys.exit(2)"))
    job = jobs.start("c.yaml", tmp_path / "c.yaml", "--resume")
    until(lambda: not jobs.listed()[0]["running"])
    (found,) = jobs.listed()
    assert found["output"] == f"said ['{tmp_path / 'c.yaml'}', '--resume']\n"
    assert (found["what"], found["exit_code"], found["pid"]) == ("c.yaml", 2, job.process.pid)
    job.output.close()


def test_one_config_runs_once_and_not_too_many_run_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "MOST_JOBS", 2)
    jobs = Jobs(tmp_path, command=(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(30)"))
    started = [jobs.start("a", tmp_path / "a"), jobs.start("b", tmp_path / "b")]
    try:
        with pytest.raises(Refused, match="already at work"):
            jobs.start("a", tmp_path / "a")
        with pytest.raises(Refused, match="2 runs are at work"):
            jobs.start("c", tmp_path / "c")
        until(lambda: jobs.listed()[1]["output"])
        assert jobs.stop_job(started[0].number) == started[0].process.pid
        with pytest.raises(Refused):
            jobs.stop_job(started[0].number)
        assert started[0].process.wait(20) == -signal.SIGTERM
        with pytest.raises(Refused, match="no longer"):
            jobs.stop_job(started[0].number)
        with pytest.raises(Refused, match="no longer"):
            jobs.stop_job(99)
    finally:
        for job in started:
            job.process.kill()
            job.process.wait()
            job.output.close()


def test_resuming_names_the_run_and_says_so_to_the_command(tmp_path):
    run = write_run(tmp_path / "runs" / "a", run_events(100, upto=10))
    jobs = Jobs(tmp_path, command=(sys.executable, "-c", "import sys; print(sys.argv[1:])"))
    headers = {"origin": "http://127.0.0.1"}
    with TestClient(make_app(Served(tmp_path), Policy.of("127.0.0.1"), jobs), base_url="http://127.0.0.1") as client:
        assert client.post("/api/resume", json={"run": "runs/a"}, headers=headers).status_code == 200
        until(lambda: not jobs.listed()[0]["running"])
        assert jobs.listed()[0]["output"] == f"{[str(run), '--resume']}\n"
    with TestClient(make_app(Served(tmp_path, [run]), Policy.of("127.0.0.1")), base_url="http://127.0.0.1") as client:
        assert client.post("/api/resume", json={"run": "runs/a"}, headers=headers).status_code == 409
    jobs._jobs[0].output.close()


def test_a_run_started_on_the_page_trains_and_stops_with_a_checkpoint(tmp_path, monkeypatch):
    """The whole way: a config file, a real `longtune train`, and one signal."""
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path / "cache"))
    model, data = write_model(tmp_path / "model"), write_rows(tmp_path / "data")
    settings = {"steps": 5000, "save_every": 0, "eval_every": 0}
    write_config(tmp_path / "new.yaml", model, data, tmp_path / "runs" / "new", **settings)
    served, jobs = Served(tmp_path), Jobs(tmp_path)
    headers = {"origin": "http://127.0.0.1"}
    with TestClient(make_app(served, Policy.of("127.0.0.1"), jobs), base_url="http://127.0.0.1") as client:

        def state():
            served.forget_listing()
            found = {run["run"]: run for run in client.get("/api/runs").json()["runs"]}
            return found.get("runs/new", {"status": "none", "step": 0})

        def job():
            return client.get("/api/jobs").json()[0]

        assert client.get("/api/configs").json()[0]["config"] == "new.yaml"
        started = client.post("/api/start", json={"config": "new.yaml"}, headers=headers).json()
        try:
            until(lambda: state()["status"] == "running" or not job()["running"])
            assert state()["status"] == "running", job()["output"]
            stopped = client.post("/api/stop", json={"run": "runs/new"}, headers=headers)
            assert stopped.json() == {"pid": started["pid"]}
            until(lambda: not job()["running"])
            assert (job()["exit_code"], state()["status"]) == (143, "stopped"), job()["output"]
            assert 0 < state()["step"] < 5000
            assert list((tmp_path / "runs" / "new" / "checkpoints").iterdir())
            assert client.post("/api/stop", json={"run": "runs/new"}, headers=headers).status_code == 409
        finally:
            for left in jobs._jobs:
                left.process.kill()
                left.process.wait()
                left.output.close()
