"""Trackers: what each library has after a run that was stopped and resumed, read back with that library."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import threading
from types import SimpleNamespace

import pytest

from longtune.config import load_config
from longtune.errors import UserError
from longtune.train import trackers, train
from longtune.train.trackers import TrackedRun, scalars
from tests.tiny_run import adapter_bytes, losses, read_events, write_config, write_model, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def config(model, data, tmp_path):
    return write_config(tmp_path / "run.yaml", model, data, tmp_path / "run")


def needs(name):
    reason = f"needs {name}: pip install 'longtune[{name}]'"
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=reason)


def killed_and_resumed(config, tracker):
    """A run that takes step 5 twice, because its last checkpoint is of step 4."""

    def die(event):
        if event["event"] == "train" and event["step"] == 5:
            raise SystemExit

    loaded = load_config(config, [f"track=[{tracker}]", "samples.prompts=1", "samples.max_new_tokens=3"])
    with pytest.raises(SystemExit):
        train(loaded, die)
    run = train(loaded, resume=True).folder
    assert not [event for event in read_events(run) if event["event"] == "warning"]
    return run


@needs("tensorboard")
def test_tensorboard_has_every_step_once(config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = killed_and_resumed(config, "tensorboard")
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    written = {entry.step: entry.value for entry in found.Scalars("train/loss")}
    assert [entry.step for entry in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert written == pytest.approx(losses(run), rel=1e-6)
    assert [entry.step for entry in found.Scalars("validation/loss")] == [3, 6]
    assert {"train/grad_norm", "train/learning_rate", "train/tokens_per_second"} <= set(found.Tags()["scalars"])
    texts = found.Tensors("samples/0/text_summary")
    assert [entry.step for entry in texts] == [0, 3, 6]
    assert b"reference" in texts[0].tensor_proto.string_val[0]
    assert b"learning_rate" in found.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@needs("mlflow")
def test_mlflow_goes_on_in_the_same_run(config, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = killed_and_resumed(config, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("longtune")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "train/loss")
    assert [entry.step for entry in history] == [1, 2, 3, 4, 5, 6]
    assert {entry.step: entry.value for entry in history} == losses(run)
    assert tracked.data.params["train.steps"] == "6"
    assert [file.path for file in client.list_artifacts(tracked.info.run_id, "samples")] == [
        f"samples/step-{step:05d}.md" for step in (0, 3, 6)
    ]


@needs("trackio")
def test_trackio_goes_on_in_the_same_run(config, monkeypatch, tmp_path):
    if "trackio" in sys.modules:
        pytest.skip("trackio has been imported already, and reads TRACKIO_DIR only then")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = killed_and_resumed(config, "trackio")
    name = json.loads((run / "trackers.json").read_text())["trackio"]["name"]
    assert SQLiteStorage.get_runs("longtune") == [name]
    rows = [row for row in SQLiteStorage.get_logs("longtune", name) if "train/loss" in row]
    assert {row["step"]: row["train/loss"] for row in rows} == losses(run)
    assert len(rows) == 6
    assert trackio.context_vars.current_run.get() is None


@needs("wandb")
def test_wandb_is_offline_without_a_login_and_keeps_its_id(config, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    run = killed_and_resumed(config, "wandb")
    number = json.loads((run / "trackers.json").read_text())["wandb"]["id"]
    parts = sorted((run / "wandb").glob("offline-run-*"))
    assert [part.name.rpartition("-")[2] for part in parts] == [number, number]
    assert [len(list(part.glob("run-*.wandb"))) for part in parts] == [1, 1]
    steps = [list(wandb_steps(next(part.glob("run-*.wandb")))) for part in parts]
    assert steps == [[0, 1, 2, 3, 4], [5, 6]], "0 has the first samples"


def wandb_steps(file):
    """Steps of the history records of an offline file: LevelDB's log format after seven bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # A whole record, or the last part of one.
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                yield record.history.step.num


@needs("wandb")
def test_wandb_is_online_where_a_key_is(monkeypatch, tmp_path):
    from longtune.train.trackers import wandb

    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not wandb._logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb._logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:8080")
    assert not wandb._logged_in()


def test_a_missing_package_is_named_before_anything_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        train(load_config(config, ["track=[wandb, mlflow]"]))
    assert [problem.fix for problem in caught.value.problems] == [
        "pip install 'longtune[wandb]'",
        "pip install 'longtune[mlflow]'",
    ]
    assert not (tmp_path / "run").exists()


class Fake:
    """A tracker in a list."""

    has = None

    def __init__(self, run: TrackedRun):
        self.run, self.keeps, self.got, self.closed = run, {"id": "a"}, [], 0

    def __call__(self, event):
        self.got.append((event["event"], event.get("step")))
        if event["event"] == "validation":
            raise ConnectionError("the server has gone")

    def close(self):
        self.closed += 1
        raise TimeoutError("still gone")


@pytest.fixture
def fakes(monkeypatch):
    made, refusals = [], []

    def start(run):
        if refusals:
            raise refusals[0]
        made.append(Fake(run))
        return made[-1]

    monkeypatch.setattr(trackers, "check_installed", lambda names: None)
    real = importlib.import_module
    home = SimpleNamespace(start=start)
    find = lambda name, *rest: home if name.startswith("longtune.train.trackers.") else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(trackers.importlib, "import_module", find)
    return made, refusals


def test_a_tracker_that_fails_is_one_warning_and_the_same_adapter(config, tmp_path, fakes, capsys):
    made, _ = fakes
    train(load_config(config, ["track=[wandb]"]))
    train(load_config(config, [f"output={tmp_path / 'plain'}"]))
    (tracker,) = made
    assert tracker.got[-1] == ("validation", 3), "nothing comes after its failure"
    assert tracker.closed == 1
    assert "could not be ended: TimeoutError" in capsys.readouterr().err
    events = read_events(tmp_path / "run")
    (warning,) = [event for event in events if event["event"] == "warning"]
    assert "tracker wandb failed at the event validation (ConnectionError: the server has gone)" in warning["reason"]
    assert events[-1]["event"] == "done"
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "plain")


def test_one_that_cannot_start_stops_a_new_run_and_not_a_resumed_one(config, tmp_path, fakes):
    made, refusals = fakes
    refusals.append(PermissionError("no such entity"))
    tracked = load_config(config, ["track=[wandb]"])
    with pytest.raises(UserError, match="PermissionError: no such entity"):
        train(tracked)
    refusals.clear()
    cancel = threading.Event()
    stop = lambda event: cancel.set() if event["event"] == "train" and event["step"] == 2 else None  # noqa: E731
    assert train(tracked, stop, cancel=cancel).step == 2, "the folder can still be used"
    assert made[-1].run.saved == {}
    refusals.append(ConnectionError("offline"))
    assert train(tracked, resume=True).adapter
    warned = [event["reason"] for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    assert any("tracker wandb can't be started" in reason for reason in warned)


def test_a_damaged_note_of_the_trackers_is_a_warning(config, tmp_path, fakes):
    made, _ = fakes
    tracked = load_config(config, ["track=wandb", "train.stop_after=1e-6"])
    train(tracked)
    (tmp_path / "run" / "trackers.json").write_text("{")
    train(tracked, resume=True)
    assert not made[1].run.resumed
    warned = [event["reason"] for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    assert any("trackers.json is damaged" in reason for reason in warned)


def test_what_a_tracker_kept_comes_back_and_known_steps_do_not(config, tmp_path, fakes):
    made, _ = fakes

    def die(event):
        if event["event"] == "train" and event["step"] == 3:
            raise SystemExit

    tracked = load_config(config, ["track=[wandb]", "train.eval_every=0"])
    with pytest.raises(SystemExit):
        train(tracked, die)
    train(tracked, resume=True)
    assert made[1].run.resumed
    assert made[1].run.saved == {"id": "a"}
    assert [step for kind, step in made[1].got if kind == "train"] == [3, 4, 5, 6], "the last one may have been lost"


def test_scalars_are_the_finite_numbers():
    event = {"event": "train", "step": 3, "t": 1.0, "loss": float("nan"), "correct": 2, "rows": ["a"], "grad_norm": 0.5}
    assert scalars(event) == {"train/correct": 2.0, "train/grad_norm": 0.5}
    assert scalars({"event": "checkpoint", "step": 3, "seconds": 1.0}) == {}
