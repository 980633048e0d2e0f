"""Resuming: what is compared with the start, which checkpoint is taken, who may write, and what a log keeps."""

from __future__ import annotations

import json
import shutil
import threading

import pytest

from longtune.config import load_config
from longtune.errors import UserError
from longtune.train import train
from longtune.train.events import EventLog
from longtune.train.folder import RunFolder
from tests.tiny_run import adapter_bytes, losses, read_events, write_config, write_model, write_pairs, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="module")
def unbroken(model, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    train(load_config(write_config(folder / "run.yaml", model, data, folder / "run")))
    return folder / "run"


@pytest.fixture(scope="module")
def stopped_once(model, data, tmp_path_factory):
    """A run that was stopped after step 5, to be copied."""
    folder = tmp_path_factory.mktemp("stopped")
    config = write_config(folder / "run.yaml", model, data, folder / "run")
    stop_at(config, 5)
    return folder / "run"


@pytest.fixture
def stopped(stopped_once, tmp_path):
    shutil.copytree(stopped_once, tmp_path / "run")
    return tmp_path / "run"


def stop_at(config, step, overrides=()):
    cancel = threading.Event()
    stop = lambda event: cancel.set() if event["event"] == "train" and event["step"] == step else None  # noqa: E731
    return train(load_config(config, overrides), stop, cancel=cancel)


def spoil(run, *steps):
    for step in steps:
        file = run / "checkpoints" / f"step-{step:05d}" / "optimiser.safetensors"
        file.write_bytes(file.read_bytes()[:-1])


def test_the_checkpoint_before_a_damaged_one_is_taken_and_pruning_never_counts_the_damaged(stopped, unbroken):
    spoil(stopped, 4, 5)
    seen = []
    config = load_config(stopped, ["train.keep=last 1", "train.save_every=1", "train.stop_after=1e-6"])
    train(config, seen.append, resume=True)
    assert [event["step"] for event in seen if event["event"] == "resumed"] == [2]
    said = [event["reason"] for event in seen if event["event"] == "warning"]
    assert len(said) == 2
    assert all("damaged checkpoint passed over" in reason and "optimiser.safetensors" in reason for reason in said)
    kept = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    assert kept == ["damaged-step-00004", "damaged-step-00005", "step-00002"], "the only whole one must stay"
    train(load_config(stopped, ["train.keep=last 1"]), resume=True)
    assert adapter_bytes(stopped) == adapter_bytes(unbroken)


def test_nothing_is_thrown_away_when_every_checkpoint_is_damaged(stopped, unbroken):
    spoil(stopped, 2, 4, 5)
    before = (stopped / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as caught:
        train(load_config(stopped), resume=True)
    assert [problem.place.rpartition("step-")[2] for problem in caught.value.problems] == ["00005", "00004", "00002"]
    assert f"remove {stopped / 'checkpoints'}" in caught.value.problems[-1].fix
    assert (stopped / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(stopped / "checkpoints")
    train(load_config(stopped), resume=True)
    assert adapter_bytes(stopped) == adapter_bytes(unbroken)
    assert losses(stopped) == losses(unbroken)


def test_a_checkpoint_without_one_of_its_files_in_the_manifest_is_damaged(stopped):
    manifest = stopped / "checkpoints" / "step-00005" / "manifest.json"
    manifest.write_text(json.dumps({"trainer.json": json.loads(manifest.read_text())["trainer.json"]}))
    seen = []
    train(load_config(stopped, ["train.stop_after=1e-6"]), seen.append, resume=True)
    assert "adapter_config.json is missing" in next(e["reason"] for e in seen if e["event"] == "warning")


def test_a_checkpoint_under_another_step_s_name_is_passed_over(stopped, unbroken):
    checkpoints = stopped / "checkpoints"
    (checkpoints / "step-00005").rename(checkpoints / "step-00099")
    seen = []
    train(load_config(stopped), seen.append, resume=True)
    assert "step-00099: it is of step 5" in next(e["reason"] for e in seen if e["event"] == "warning")
    assert [event["step"] for event in seen if event["event"] == "resumed"] == [4]
    assert adapter_bytes(stopped) == adapter_bytes(unbroken)


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_cannot_be_locked_is_named(model, data, tmp_path, resume):
    config = load_config(write_config(tmp_path / "run.yaml", model, data, tmp_path / "run"))
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(UserError, match="can't be written: Is a directory"):
        train(config, resume=resume)


def test_what_killed_writers_left_is_removed(stopped):
    left = [stopped / "checkpoints" / ".step-00006.tmp", stopped / "checkpoints" / ".step-00001.removed"]
    for folder in left:
        folder.mkdir()
    (stopped / ".metrics.json.tmp").write_text("{")
    train(load_config(stopped, ["train.stop_after=1e-6"]), resume=True)
    assert not [path.name for path in stopped.rglob(".*") if path.name != ".lock"]


def test_old_checkpoints_that_a_kill_kept_are_removed(stopped):
    train(load_config(stopped, ["train.keep=last 2", "train.stop_after=1e-6"]), resume=True)
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == ["step-00004", "step-00005"]


def test_what_somebody_else_put_beside_the_checkpoints_stays(stopped):
    (stopped / "checkpoints" / "step-best").mkdir()
    (stopped / "checkpoints" / "notes.txt").write_text("x")
    seen = []
    train(load_config(stopped, ["train.keep=last 1"]), seen.append, resume=True)
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == ["notes.txt", "step-00006", "step-best"]
    assert not [event for event in seen if event["event"] == "warning"]


@pytest.mark.parametrize("text", ["", '{"data": ', "[]", "3", "null"])
@pytest.mark.parametrize("name", ["environment.json", "plan.json"])
def test_a_damaged_note_of_the_run_is_named(stopped, name, text):
    (stopped / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}: is damaged .* put it back"):
        train(load_config(stopped), resume=True)


@pytest.mark.parametrize(
    "plan", ["{}", '{"reason": "x"}', '{"plan": [], "reason": "x"}', '{"plan": {"x": 1}, "reason": ""}']
)
def test_a_plan_that_is_none_is_named(stopped, plan):
    (stopped / "plan.json").write_text(plan)
    with pytest.raises(UserError, match=r"plan\.json: (is damaged|holds no plan)"):
        train(load_config(stopped), resume=True)


def test_what_somebody_removed_of_a_run_s_description_is_written_again(stopped, unbroken):
    config = load_config(stopped)
    for name in ("config.yaml", "environment.json", "plan.json"):
        (stopped / name).unlink()
    train(config, resume=True)
    assert adapter_bytes(stopped) == adapter_bytes(unbroken)
    assert load_config(stopped).digest == load_config(unbroken).digest
    assert json.loads((stopped / "plan.json").read_text())["measured"]["seconds"] > 0


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        "null",
        "{}",
        '{"event": 1}',
        '{"event": "train"}',
        '{"event": "train", "step": "x"}',
        '{"event": "validation", "step": [1]}',
        '{"event": "warning"}',
        "\0\0\0",
    ],
)
def test_a_line_that_is_no_event_keeps_no_run_from_going_on(stopped, line):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    train(load_config(stopped, ["train.stop_after=1e-6"]), resume=True)


def test_what_may_differ_is_said(stopped):
    facts = json.loads((stopped / "environment.json").read_text())
    facts["packages"]["torch"] = "1.0"
    (stopped / "environment.json").write_text(json.dumps(facts))
    seen = []
    config = load_config(stopped, ["train.save_every=3", "samples.prompts=1", "train.stop_after=1e-6"])
    train(config, seen.append, resume=True)
    (resumed,) = [event for event in seen if event["event"] == "resumed"]
    keys = [line.partition(":")[0] for line in resumed["changed"]]
    assert keys == ["output", "samples.prompts", "train.save_every", "train.stop_after", "packages.torch"]
    assert resumed["changed"][2] == "train.save_every: 2 at the start, 3 now"


def test_another_base_model_under_the_same_name_is_refused(data, tmp_path):
    model = write_model(tmp_path / "model")
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run")
    stop_at(config, 2)
    shutil.rmtree(model)
    write_model(model, seed=1)
    with pytest.raises(UserError, match="base model: is not what this run was started with"):
        train(load_config(config), resume=True)


def test_another_reference_adapter_is_refused(model, tmp_path):
    data = write_pairs(tmp_path / "data")
    for seed in (0, 1):
        settings = ["method=orpo", f"train.seed={seed}", "train.steps=1"]
        train(load_config(write_config(tmp_path / "f.yaml", model, data, tmp_path / f"frozen-{seed}"), settings))
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run")
    settings = ["method=dpo", f"dpo.reference_adapter={tmp_path / 'frozen-0'}"]
    stop_at(config, 2, settings)
    shutil.rmtree(tmp_path / "frozen-0")
    (tmp_path / "frozen-1").rename(tmp_path / "frozen-0")
    with pytest.raises(Exception, match="the reference model or its data is not what"):
        train(load_config(config, settings), resume=True)


def test_a_second_run_on_one_folder_is_refused_whatever_it_is_called(stopped, tmp_path):
    (tmp_path / "link").symlink_to(stopped)
    with RunFolder(stopped).lock():
        for name in (stopped, tmp_path / "link", stopped / ".." / "run"):
            with pytest.raises(UserError, match="another process is writing this run"):
                train(load_config(stopped, [f"output={name}"]), resume=True)


def test_a_run_in_work_keeps_a_new_one_out(model, data, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    refused = []

    def second(event):
        if event["event"] == "train" and event["step"] == 1:
            for name in ("run", "link"):
                with pytest.raises(UserError) as caught:
                    train(load_config(config, [f"output={tmp_path / name}"]))
                refused.append(str(caught.value))

    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", steps=2)
    train(load_config(config), second)
    assert len(refused) == 2


def test_a_validation_that_a_stop_left_out_is_taken_by_the_resumed_run(model, data, tmp_path, unbroken):
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run")
    stop_at(config, 6)
    assert read_events(tmp_path / "run")[-1]["event"] == "stopped"
    assert [e["step"] for e in read_events(tmp_path / "run") if e["event"] == "validation"] == [3]
    train(load_config(config), resume=True)
    ours, truth = (
        [(e["step"], e["loss"]) for e in read_events(run) if e["event"] == "validation"]
        for run in (tmp_path / "run", unbroken)
    )
    assert ours == truth
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(unbroken)


def test_a_log_whose_first_line_is_torn_begins_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event":"me')
    log = EventLog(path)
    assert log.is_new
    log.emit("meta", steps=1)
    log.close()
    again = EventLog(path)
    assert not again.is_new
    again.close()


def test_a_measurement_that_the_log_has_is_not_written_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = EventLog(path)
    for step in (2, 4):
        log.emit("validation", step=step, loss=float(step))
    log.close()
    again = EventLog(path)
    again.emit("resumed", step=2)
    for step in (2, 4):
        again.emit("validation", step=step, loss=float(step))
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in lines[2:]] == [("resumed", 2), ("validation", 4)]


def test_a_run_is_done_also_when_a_listener_failed_at_its_end(model, data, tmp_path):
    config = load_config(write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", steps=2))

    def broken(event):
        if event["event"] == "done":
            raise ConnectionError("no route to host")

    train(config, broken)
    assert read_events(tmp_path / "run")[-1]["event"] == "warning"
    with pytest.raises(UserError, match="this run is done"):
        train(config, resume=True)


def test_keep_best_needs_validation_data_and_a_metric_that_the_method_has(model, data, tmp_path):
    settings = ["train.keep=best", "train.save_every=3"]
    rows = data / "train.jsonl"
    config = write_config(tmp_path / "run.yaml", model, rows, tmp_path / "run")
    with pytest.raises(UserError, match="without validation data"):
        train(load_config(config, settings))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="sft has no margin"):
        load_config(config, ["train.keep=best margin", "train.save_every=3"])


def test_keep_best_by_margin_keeps_the_widest(model, tmp_path):
    data = write_pairs(tmp_path / "data")
    changes = {"eval_every": 1, "save_every": 1, "keep": "best margin"}
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", **changes)
    done = train(load_config(config, ["method=orpo"]))
    best = done.metrics["best_margin"]["step"]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"step-{step:05d}" for step in (best, 6)}
