"""`longtune train` through the real command line: a run's folder, resuming, and settings that must not matter."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest
import torch
from typer.testing import CliRunner

from longtune.cli import app
from longtune.config import load_config
from longtune.train import train
from tests.tiny_run import adapter_bytes, losses, read_events, tensors, write_config, write_model, write_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def make_config(model, data, tmp_path):
    return lambda name, **changes: write_config(tmp_path / f"{name}.yaml", model, data, tmp_path / name, **changes)


def at_step(number, action):
    """A callback that does something once, when a step is through."""
    return lambda event: action() if event["event"] == "train" and event["step"] == number else None


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="session")
def unbroken(model, data, tmp_path_factory):
    """A finished run, for the tests that compare with it or read it."""
    folder = tmp_path_factory.mktemp("unbroken")
    config = write_config(folder / "run.yaml", model, data, folder / "run")
    result = call("train", config, "--json")
    return folder / "run", result


PLAIN = ["--set", "lora.dropout=0", "--set", "train.learning_rate=0.001"]


@pytest.fixture(scope="session")
def unbroken_plain(model, data, tmp_path_factory):
    """Ten steps without dropout, everything in one chunk and kept."""
    folder = tmp_path_factory.mktemp("plain")
    config = write_config(folder / "run.yaml", model, data, folder / "run", steps=10)
    call("train", config, *PLAIN, "--set", "memory={chunk_tokens: null, keep: everything}")
    return folder / "run"


def test_a_run_leaves_everything_that_its_folder_promises(unbroken):
    run, _ = unbroken
    for name in ("config.yaml", "environment.json", "plan.json", "metrics.jsonl", "metrics.json"):
        assert (run / name).is_file(), name
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00002", "step-00004", "step-00006"]
    for folder in (run / "adapter", run / "checkpoints" / "step-00004"):
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not [path for path in run.rglob(".*") if path.name != ".lock"], "nothing temporary stays"
    plan = json.loads((run / "plan.json").read_text())
    assert plan["plan"]["chunk_tokens"] == 16
    assert plan["measured"]["peak_bytes"] > 0


def test_events_begin_with_meta_end_with_done_and_the_loss_falls(unbroken):
    run, _ = unbroken
    events = read_events(run)
    assert events[0]["event"] == "meta"
    assert [event["event"] for event in events].count("done") == 1
    assert events[-1]["event"] == "done"
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    validations = [event for event in events if event["event"] == "validation"]
    assert [event["step"] for event in validations] == [3, 6]
    assert validations[1]["loss"] < validations[0]["loss"]
    assert validations[0]["rows"] == 5
    for event in events:
        if event["event"] == "train":
            assert event["tokens_per_second"] == pytest.approx(event["tokens"] / event["seconds"])


def test_the_json_object_is_the_last_and_only_line_of_stdout(unbroken):
    run, result = unbroken
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found["status"] == "done"
    assert found["adapter"] == str(run / "adapter")
    assert found["step"] == found["steps"] == 6
    assert found["best"]["step"] == 6
    assert "step 6/6" in result.stderr


def test_the_resolved_config_of_a_run_trains_the_same_adapter(unbroken, tmp_path):
    run, _ = unbroken
    call("train", run, "--set", f"output={tmp_path / 'again'}")
    assert adapter_bytes(tmp_path / "again") == adapter_bytes(run)


@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_a_stopped_run_resumes_bit_for_bit(make_config, unbroken, stop_at):
    config = make_config("stopped")
    cancel = threading.Event()
    stopped = train(load_config(config), at_step(stop_at, cancel.set), cancel=cancel)
    assert (stopped.reason, stopped.step, stopped.adapter) == ("cancelled", stop_at, None)
    call("train", config, "--resume")
    assert adapter_bytes(stopped.folder) == adapter_bytes(unbroken[0])
    assert losses(stopped.folder) == losses(unbroken[0])
    assert [event["event"] for event in read_events(stopped.folder)][-1] == "done"


def test_a_killed_run_resumes_from_its_newest_checkpoint_bit_for_bit(make_config, unbroken, tmp_path):
    config = make_config("killed")
    script = (
        "import os, sys; from longtune.config import load_config; from longtune.train import train\n"
        "die = lambda event: os.kill(os.getpid(), 9) if event['event'] == 'train' and event['step'] == 3 else None\n"
        "train(load_config(sys.argv[1]), die)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(config)], check=False)
    assert killed.returncode == -signal.SIGKILL
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"event":"train","ste')
    call("train", tmp_path / "killed", "--resume")
    assert adapter_bytes(tmp_path / "killed") == adapter_bytes(unbroken[0])
    events = read_events(tmp_path / "killed")
    assert [event["step"] for event in events if event["event"] == "train"] == [1, 2, 3, 4, 5, 6], "no gap, none twice"
    assert losses(tmp_path / "killed") == losses(unbroken[0])


def test_a_run_killed_before_its_first_checkpoint_starts_again(make_config, unbroken, tmp_path):
    config = make_config("early")
    with pytest.raises(SystemExit):
        train(load_config(config), at_step(1, sys.exit))
    call("train", config, "--resume")
    assert adapter_bytes(tmp_path / "early") == adapter_bytes(unbroken[0])


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(make_config, unbroken, tmp_path):
    config = make_config("damaged")
    cancel = threading.Event()
    train(load_config(config), at_step(4, cancel.set), cancel=cancel)
    weights = tmp_path / "damaged" / "checkpoints" / "step-00004" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    result = call("train", config, "--resume")
    assert "step-00004" in result.output
    assert "passed over" in result.output
    assert adapter_bytes(tmp_path / "damaged") == adapter_bytes(unbroken[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_in_work_and_leaves(make_config, unbroken, number):
    config = make_config("signalled")
    # Not always Python's own: a shell's background job ignores SIGINT.
    before = signal.getsignal(signal.SIGINT)
    stopped = train(load_config(config), at_step(3, lambda: signal.raise_signal(number)))
    assert stopped.reason == number.name
    assert (stopped.folder / "checkpoints" / "step-00003").is_dir()
    assert read_events(stopped.folder)[-1]["event"] == "stopped"
    assert signal.getsignal(signal.SIGINT) is before
    call("train", stopped.folder, "--resume")
    assert adapter_bytes(stopped.folder) == adapter_bytes(unbroken[0])


def test_a_second_signal_leaves_at_once(make_config):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(load_config(make_config("twice")), at_step(1, twice))


def test_a_signalled_command_leaves_with_the_signals_code(make_config, monkeypatch):
    from longtune.watch import ProgressLine

    plain = ProgressLine.__call__

    interrupt = at_step(1, lambda: signal.raise_signal(signal.SIGINT))

    def interrupting(self, event):
        plain(self, event)
        interrupt(event)

    monkeypatch.setattr(ProgressLine, "__call__", interrupting)
    result = call("train", make_config("interrupted"), "--json", code=130)
    assert json.loads(result.stdout)["reason"] == "SIGINT"


def test_the_time_limit_saves_and_leaves_with_code_0(make_config):
    result = call("train", make_config("limited"), "--set", "train.stop_after=0.000001", "--json")
    assert json.loads(result.stdout)["reason"] == "stop_after"
    assert json.loads(call("train", make_config("brief"), "--stop-after", "0.001s", "--json").stdout)["reason"]
    assert "like 3h, 90m" in call("train", make_config("wrong"), "--stop-after", "soon", code=2).stderr


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("accumulated", {"batch_size": 1, "accumulate": 4}),
        ("packed", {"batch_size": 4, "accumulate": 1}),
    ],
)
def test_how_a_step_is_cut_into_micro_batches_does_not_matter(make_config, tmp_path, name, changes):
    dropless = ["--set", "lora.dropout=0"]
    call("train", make_config("reference"), *dropless)
    call("train", make_config(name, **changes), *dropless)
    ours, truth = losses(tmp_path / name), losses(tmp_path / "reference")
    assert ours.keys() == truth.keys()
    assert max(abs(ours[step] - truth[step]) for step in truth) < 1e-4
    for key, tensor in tensors(tmp_path / "reference").items():
        torch.testing.assert_close(tensors(tmp_path / name)[key], tensor, atol=1e-4, rtol=1e-3)


PLANS = [
    {"chunk_tokens": 16, "boundary_store": "host", "keep": "attention"},
    {"chunk_tokens": 7, "boundary_store": "disk", "keep": "kv"},
    {"chunk_tokens": 16, "boundary_store": "host", "layers_per_segment": 2, "head_chunk": 3, "halves": True},
    {"chunk_tokens": None, "boundary_store": "disk", "layers_per_segment": None, "keep": "attention", "keep_layers": 1},
    {"chunk_tokens": 30, "keep": "everything"},
    {"chunk_tokens": 9, "boundary_store": "host", "keep": "everything", "keep_layers": 1, "head_chunk": None},
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(str(value) for value in plan.values()))
def test_ten_steps_are_the_same_whatever_the_plan(make_config, unbroken_plain, tmp_path, plan):
    """Largest difference and drift of the losses, and the adapter, in fp32."""
    call("train", make_config("other", steps=10), *PLAIN, "--set", f"memory={json.dumps(plan)}")
    ours, truth = losses(tmp_path / "other"), losses(unbroken_plain)
    assert ours.keys() == truth.keys() and len(truth) == 10
    differences = [ours[step] - truth[step] for step in truth]
    assert max(abs(difference) for difference in differences) < 1e-6
    assert abs(sum(differences)) / len(differences) < 5e-7
    for key, tensor in tensors(unbroken_plain).items():
        torch.testing.assert_close(tensors(tmp_path / "other")[key], tensor, atol=1e-6, rtol=1e-5)


def test_keep_last_leaves_the_newest_checkpoints_only(make_config, tmp_path):
    call("train", make_config("kept", keep="last 2"))
    kept = sorted(path.name for path in (tmp_path / "kept" / "checkpoints").iterdir())
    assert kept == ["step-00004", "step-00006"]


def test_epochs_see_every_row_once(make_config, tmp_path):
    call("train", make_config("epoch", steps=None, epochs=1, batch_size=5, accumulate=2))
    assert list(losses(tmp_path / "epoch")) == [1, 2]
    meta, *_, done = read_events(tmp_path / "epoch")
    assert done["tokens"] == meta["tokens"]


def test_a_run_with_options_alone(model, data, tmp_path):
    arguments = ["--model", model, "--data", data, "--output", tmp_path / "run", "--set", "train.steps=1"]
    result = call("train", *arguments, "--set", "train.accumulate=1", "--json")
    assert json.loads(result.stdout)["steps"] == 1


def test_a_warm_start_takes_an_adapters_weights(make_config, unbroken, tmp_path):
    call("train", make_config("warm", steps=1), "--set", f"init_adapter={unbroken[0]}")
    assert losses(tmp_path / "warm")[1] < losses(unbroken[0])[1] - 0.3


def test_columns_of_other_names_are_mapped(model, data, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "abc", "answer": "cba"}\n')
    arguments = ["--model", model, "--data", rows, "--output", tmp_path / "run", "--map"]
    result = call("train", *arguments, "question=prompt,answer=completion", "--set", "train.steps=1", "--json")
    assert json.loads(result.stdout)["step"] == 1
    assert load_config(tmp_path / "run").columns == {"question": "prompt", "answer": "completion"}
    assert "--map" in call("train", *arguments, "question", code=2).stderr


def test_a_run_outlives_the_reader_of_its_output(make_config, tmp_path):
    config = make_config("piped", steps=2, eval_every=0, save_every=0)
    command = [sys.executable, "-c", "from longtune.cli import main; main()", "train", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        _, said = running.communicate()
    assert running.returncode == 0, said
    assert read_events(tmp_path / "piped")[-1]["event"] == "done"
