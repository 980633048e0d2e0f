"""Files and folders that appear whole or not at all, and the lock of a run folder."""

from __future__ import annotations

import json

import pytest

from longtune.errors import UserError
from longtune.train import checkpoint, files
from longtune.train.events import EventLog
from longtune.train.folder import RunFolder


def test_a_folder_whose_writing_fails_leaves_the_old_one_and_nothing_else(tmp_path):
    target = tmp_path / "step"
    with files.whole_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(OSError), files.whole_folder(target) as folder:
        (folder / "a").write_text("new")
        raise OSError("disk full")
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    files.write_json(tmp_path / "a.json", {"n": 1})
    files.write_json(tmp_path / "a.json", {"n": 2})
    assert files.read_json(tmp_path / "a.json") == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_second_writer_of_a_run_is_refused(tmp_path):
    with RunFolder(tmp_path / "run").lock():
        with pytest.raises(UserError, match="another process"), RunFolder(tmp_path / "run").lock():
            pass
    with RunFolder(tmp_path / "run").lock():
        pass


def test_the_log_closes_a_torn_line_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event":"meta"}\n{"event":"tr')
    seen = []
    log = EventLog(path, [seen.append])
    assert not log.is_new
    log.emit("train", step=1, loss=float("nan"))
    log.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"event":"tr'
    assert json.loads(lines[2])["loss"] is None
    assert seen[0]["step"] == 1


@pytest.mark.parametrize(
    ("keep", "left"), [("all", [1, 2, 3, 4]), ("last 1", [4]), ("last 3", [2, 3, 4]), ("best", [2, 4])]
)
def test_pruning_keeps_what_is_asked_for_and_always_the_newest(tmp_path, keep, left):
    for step in (1, 2, 3, 4):
        checkpoint.folder_of(tmp_path, step).mkdir(parents=True)
    checkpoint.prune(tmp_path, keep, {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step-{step:05d}" for step in left]


def test_a_checkpoint_with_a_missing_file_is_not_whole(tmp_path):
    for step in (1, 2):
        folder = checkpoint.folder_of(tmp_path, step)
        folder.mkdir(parents=True)
        files.write_json(folder / "trainer.json", {"step": step, "state": {}, "generators": {}})
        for name in ("adapter_config.json", "adapter_model.safetensors", "optimiser.safetensors"):
            (folder / name).write_text(name)
        digests = {file.name: files.digest(file) for file in folder.iterdir()}
        files.write_json(folder / "manifest.json", digests)
    (checkpoint.folder_of(tmp_path, 2) / "trainer.json").unlink()
    found, damaged = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(damaged) == 1
    assert "step-00002" in damaged[0]
