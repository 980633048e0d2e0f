"""A disk that is full while a checkpoint, a log line or the adapter is written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors import SafetensorError

from longtune.config import load_config
from longtune.errors import UserError
from longtune.train import RunFailed, checkpoint, events, files, train
from longtune.train.events import EventLog, LogNotWritten
from longtune.watch import read_events as read_log
from tests.tiny_run import adapter_bytes, losses, read_events, write_config, write_model, write_pairs, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def config(model, data, tmp_path):
    return write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", eval_every=0, accumulate=1)


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def fill_at(monkeypatch, step):
    """The disk is full while the checkpoint of one step is written: half of it is there."""
    whole = checkpoint.save_file

    def save_file(tensors, path):
        if f"step-{step:05d}" in str(path):
            Path(path).write_bytes(b"half of it")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        whole(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_stop_leaves_the_last_checkpoint_whole_and_says_what_to_do(config, tmp_path, monkeypatch):
    fill_at(monkeypatch, 4)
    with pytest.raises(RunFailed) as caught:
        train(load_config(config))
    for part in ("step 4", "No space left on device", "step-00002", "--resume"):
        assert part in str(caught.value)
    run = tmp_path / "run"
    assert names(run / "checkpoints") == ["step-00002"]
    assert read_events(run)[-1]["event"] == "failed"
    found, damaged = checkpoint.newest(run)
    assert (found is not None and found.step, damaged) == (2, [])
    monkeypatch.undo()
    train(load_config(config), resume=True)
    unbroken = write_config(tmp_path / "whole.yaml", *_parts(config), tmp_path / "whole", eval_every=0, accumulate=1)
    train(load_config(unbroken))
    assert adapter_bytes(run) == adapter_bytes(tmp_path / "whole")


def _parts(config):
    loaded = load_config(config)
    assert isinstance(loaded.data, str)
    return Path(loaded.model), Path(loaded.data)


def test_continue_goes_on_and_saves_the_next_one(config, tmp_path, monkeypatch):
    fill_at(monkeypatch, 4)
    run = train(load_config(config, ["train.on_save_error=continue"]))
    assert run.metrics["status"] == "done"
    assert names(tmp_path / "run" / "checkpoints") == ["step-00002", "step-00006"]
    (warning,) = [event for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    assert warning["step"] == 4
    assert warning["problem"] == "checkpoint"
    assert "No space left on device" in warning["reason"]


def test_a_run_that_is_asked_to_leave_and_cannot_save_fails_under_either_policy(config, tmp_path, monkeypatch):
    fill_at(monkeypatch, 3)
    import threading

    cancel = threading.Event()
    stop = lambda event: cancel.set() if event["event"] == "train" and event["step"] == 3 else None  # noqa: E731
    with pytest.raises(RunFailed, match="step 3"):
        train(load_config(config, ["train.on_save_error=continue"]), stop, cancel=cancel)
    assert read_events(tmp_path / "run")[-1]["event"] == "failed"


def test_an_adapter_that_cannot_be_written_is_a_failed_run_that_can_be_resumed(config, tmp_path, monkeypatch):
    monkeypatch.setattr("longtune.train.run.save_adapter", no_space)
    with pytest.raises(RunFailed, match="No space left"):
        train(load_config(config))
    monkeypatch.undo()
    assert train(load_config(config), resume=True).adapter


def test_a_run_that_cannot_begin_says_so_and_can_be_started_with_resume(config, monkeypatch):
    monkeypatch.setattr("longtune.train.run.files.write_json", no_space)
    with pytest.raises(UserError, match="can't be written: No space left on device"):
        train(load_config(config))
    monkeypatch.undo()
    assert train(load_config(config), resume=True).adapter


def test_references_that_cannot_be_kept_do_not_stop_a_run(model, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("longtune.train.references.save_file", no_space)
    config = write_config(tmp_path / "run.yaml", model, write_pairs(tmp_path / "pairs"), tmp_path / "run", steps=1)
    train(load_config(config, ["method=dpo"]))
    said = [event["reason"] for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    assert len(said) == 2, "once for training rows, once for validation"
    assert all("No space left on device; they are not kept for other runs" in reason for reason in said)


@pytest.fixture
def full_log(tmp_path, monkeypatch):
    """A log whose disk takes half of a line and is then full; returns a function that makes room."""
    real, room = os.write, []

    def write(handle, data):
        if room or os.readlink(f"/proc/self/fd/{handle}") != str(tmp_path / "metrics.jsonl"):
            return real(handle, data)
        if os.fstat(handle).st_size % 2 == 0:
            return real(handle, data[: len(data) // 2 | 1])
        return no_space()

    monkeypatch.setattr(events.os, "write", write)
    return lambda: room.append(True)


def test_a_line_that_fails_half_way_is_taken_back(tmp_path, full_log):
    log = EventLog(tmp_path / "metrics.jsonl")
    seen = []
    log.listen(seen.append)
    with pytest.raises(LogNotWritten, match=r"metrics\.jsonl can't be written \(No space left on device\)"):
        log.emit("train", step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert [event["step"] for event in seen] == [1], "listeners are told all the same"
    log.close()


def test_lines_wait_in_memory_and_come_in_their_order_when_there_is_room(tmp_path, full_log):
    log = EventLog(tmp_path / "metrics.jsonl", on_error="continue")
    for step in (1, 2):
        log.emit("train", step=step)
    with pytest.raises(LogNotWritten):
        log.sync()
    full_log()
    log.emit("train", step=3)
    log.close()
    kinds = [(event["event"], event["step"]) for event in read_log(tmp_path / "metrics.jsonl")]
    assert kinds == [("train", 1), ("warning", 1), ("train", 2), ("train", 3)]


def test_a_file_that_cannot_be_written_leaves_the_old_one_alone(tmp_path, monkeypatch):
    files.write_json(tmp_path / "metrics.json", {"n": 1})
    monkeypatch.setattr(files.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        files.write_json(tmp_path / "metrics.json", {"n": 2})
    assert names(tmp_path) == ["metrics.json"]
    assert files.read_json(tmp_path / "metrics.json") == {"n": 1}


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 400 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no tmpfs may be mounted here")
    yield folder
    # Lazily: weights that were mapped from there may wait for the garbage collector.
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_on_a_real_disk_that_fills_up(policy, model, data, tmp_path, small_disk):
    config = write_config(
        tmp_path / "run.yaml", model, data, small_disk / "run", eval_every=0, save_every=1, steps=8, accumulate=1
    )
    ballast = small_disk / "ballast"

    def fill(event):
        if event["event"] == "checkpoint" and event["step"] == 2:
            with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            # Room for some lines, but for no checkpoint.
            os.truncate(ballast, ballast.stat().st_size - 8192)
        if event["event"] == "warning" and event.get("problem") == "checkpoint" and event["step"] == 4:
            ballast.unlink()

    loaded = load_config(config, [f"train.on_save_error={policy}", "train.keep=last 2"])
    run = small_disk / "run"
    if policy == "stop":
        with pytest.raises(RunFailed, match="step 3: the checkpoint of step 3 can't be written"):
            train(loaded, fill)
        assert names(run / "checkpoints") == ["step-00001", "step-00002"]
        ballast.unlink()
        train(loaded, resume=True)
    else:
        train(loaded, fill)
        warned = [event["step"] for event in read_events(run) if event["event"] == "warning"]
        assert warned == [3, 4]
    assert names(run / "checkpoints") == ["step-00007", "step-00008"]
    assert list(losses(run)) == list(range(1, 9))
    assert json.loads((run / "metrics.json").read_text())["status"] == "done"
