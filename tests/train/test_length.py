"""What a run's config can't be given once its length is known, said by train, plan and check alike."""

from __future__ import annotations

import json
import shutil
import threading

import pytest
import yaml
from typer.testing import CliRunner

from longtune.cli import app
from longtune.config import load_config
from longtune.train import train
from tests.tiny_run import adapter_bytes, losses, read_events, write_config, write_model, write_rows

VERBS = ("train", "plan", "check")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(tmp_path):
    return write_rows(tmp_path / "data", train=12, valid=6)


def mixed(tmp_path, model, folder, weights, **settings):
    """A run over both files of a folder as sources with weights."""
    config = write_config(tmp_path / "run.yaml", model, folder, tmp_path / "run", **settings)
    values = yaml.safe_load(config.read_text())
    names = ("train.jsonl", "valid.jsonl")
    values["data"] = [
        {"path": str(folder / name), "weight": w} for name, w in zip(names, weights, strict=False) if w is not None
    ]
    values["train"] = {key: value for key, value in values["train"].items() if value is not None}
    values["memory"] = {"chunk_tokens": 16}
    config.write_text(yaml.safe_dump(values))
    return config


def call(verb, config, *options, code=0):
    result = CliRunner().invoke(app, [verb, str(config), *options])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("weights", "settings", "unseen"),
    [
        ((1, 0.01), {"steps": None, "epochs": 2}, ["valid"]),
        ((0.01, 0.02), {"steps": None}, ["train", "valid"]),
        ((0.01, None), {"steps": None, "epochs": 0.5, "tokens_per_batch": 90, "batch_size": 1}, ["train"]),
    ],
)
def test_a_source_that_contributes_nothing_is_a_problem(verb, weights, settings, unseen, model, folder, tmp_path):
    config = mixed(tmp_path, model, folder, weights, **settings)
    said = call(verb, config, code=2)
    for name in ("train", "valid"):
        assert (f"{name}.jsonl: none of its {12 if name == 'train' else 6} rows comes" in said) is (name in unseen)
    assert "fix: raise its weight to" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_a_source_that_a_short_run_does_not_reach_is_said(verb, model, folder, tmp_path):
    config = mixed(tmp_path, model, folder, (1, 0.2), steps=1, batch_size=1, accumulate=1)
    said = call(verb, config)
    assert "valid.jsonl: none of its 6 rows comes: the run ends after 1 step (0.0769 epochs)" in said


@pytest.mark.parametrize("verb", VERBS)
def test_a_warm_up_as_long_as_the_run_is_refused_once_its_steps_are_known(verb, model, folder, tmp_path):
    config = write_config(tmp_path / "run.yaml", model, folder, tmp_path / "run")
    options = ["--set", "train.epochs=1", "--set", "train.warmup_steps=3"]
    said = call(verb, config, *options, code=2)
    assert "train.warmup_steps: the warm-up of 3 steps is as long as the run (3 steps)" in said
    assert not (tmp_path / "run").exists()
    options[-1] = said.partition("fix: set it to ")[2].split()[0].join(["train.warmup_steps=", ""])
    call(verb, config, *options)


@pytest.mark.parametrize("verb", VERBS)
def test_all_that_a_length_refuses_is_said_at_once(verb, model, folder, tmp_path):
    config = mixed(tmp_path, model, folder, (1, 0.01), steps=None, epochs=1, warmup_steps=9)
    said = call(verb, config, code=2)
    assert "valid.jsonl: none of its" in said and "train.warmup_steps" in said


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("long", [True, False])
def test_rows_beyond_the_models_positions_are_said(verb, long, model, folder, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(model, short)
    values = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 64 if long else 640}))
    row = [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b"}]
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"messages": row}) + "\n")
    config = write_config(tmp_path / "run.yaml", short, folder, tmp_path / "run", steps=1)
    said = call(verb, config)
    assert ("the model was made for 64: positions past that are untrained" in said) is long
    if verb == "plan" and long:
        assert "made for 64" in call(verb, config, "--tokens", "65")
        assert "made for 64" not in call(verb, config, "--tokens", "64")


def test_counts_are_what_the_run_sees(model, folder, tmp_path):
    config = mixed(tmp_path, model, folder, (1, 0.3), steps=None, epochs=3, accumulate=1)
    found = json.loads(CliRunner().invoke(app, ["check", str(config), "--json"]).stdout.splitlines()[-1])["estimate"]
    call("train", config)
    events = read_events(tmp_path / "run")
    (meta,) = [event for event in events if event["event"] == "meta"]
    assert meta["steps"] == found["steps"] == max(event["step"] for event in events if event["event"] == "train")
    tokens = sum(event["tokens"] for event in events if event["event"] == "train")
    assert meta["seen_tokens"] == found["tokens"] == tokens
    assert meta["seen_rows"] == found["rows"] == 36 + 5
    assert [line.rpartition(", ")[2] for line in meta["data"][-2:]] == ["36 seen in this run", "5 seen in this run"]
    assert meta["epochs"] == found["epochs"] == 3


def test_a_run_over_weights_resumes_to_the_same_adapter(model, folder, tmp_path):
    config = mixed(tmp_path, model, folder, (0.25, 0.1), steps=12, batch_size=2, accumulate=1, eval_every=0)
    train(load_config(config, [f"output={tmp_path / 'unbroken'}"]))
    for step in (1, 4, 9):
        cancel = threading.Event()

        def stop(event, step=step, cancel=cancel):
            if event["event"] == "train" and event["step"] == step:
                cancel.set()

        train(load_config(config), stop, cancel=cancel, resume=step > 1)
    train(load_config(config), resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "unbroken")
