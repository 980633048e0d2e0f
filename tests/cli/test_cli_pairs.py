"""Preference methods through the command line: train, eval and resume; and pairs that can't be used."""

from __future__ import annotations

import json
import threading

import pytest
from typer.testing import CliRunner

from longtune.cli import app
from longtune.config import load_config
from longtune.train import train
from tests.tiny_run import adapter_bytes, losses, read_events, write_config, write_model, write_pairs, write_rows

METHODS = ("dpo", "orpo", "simpo")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="module")
def frozen(model, data, tmp_path_factory):
    """A finished run of another method, to start from and to compare with."""
    folder = tmp_path_factory.mktemp("frozen")
    config = write_config(folder / "run.yaml", model, data, folder / "run", steps=2)
    return train(load_config(config, ["method=orpo"])).folder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path / "cache"))


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("method", METHODS)
def test_a_run_reports_pairs_and_eval_agrees_with_its_last_validation(method, model, data, tmp_path):
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", steps=4, eval_every=2, save_every=0)
    result = call("train", config, "--method", method)
    assert "tokens saved" in result.output
    assert ("reference log-probs: 4 of 4 rows of validation" in result.output) == (method == "dpo")
    events = read_events(tmp_path / "run")
    steps = [event for event in events if event["event"] == "train"]
    for event in steps:
        assert event["pairs"] == 4
        assert event["accuracy"] == event["correct"] / event["pairs"]
        assert event["log_prob_accuracy"] == event["log_prob_correct"] / event["pairs"]
        own = {"dpo": "chosen_reward", "orpo": "odds", "simpo": "rejected_reward"}[method]
        assert {"loss", "margin", "log_prob_margin", own} <= event.keys()
    # Prompts are targets of ORPO's likelihood alone.
    assert (steps[0]["trained_tokens"] > steps[0]["tokens"] // 2 + 10) == (method == "orpo")
    line = next(line for line in result.output.splitlines() if line.startswith("step 1/4"))
    if method == "dpo":
        assert (steps[0]["ties"], steps[0]["correct"]) == (4, 0), "policy and reference are one model"
        assert steps[-1]["ties"] == 0
        assert "acc 0/4 (4 tied)  margin" in line
    else:
        assert "ties" not in steps[0]
        assert f"acc {steps[0]['correct']:.0f}/4  margin" in line
    last = [event for event in events if event["event"] == "validation"][-1]
    assert f"acc {last['correct']:.0f}/4" in result.output
    found = json.loads(call("eval", tmp_path / "run", "--base", "--json").stdout)
    for name in ("loss", "accuracy", "correct", "pairs", "margin", "log_prob_margin", "rows"):
        assert found[name] == pytest.approx(last[name], rel=1e-4, abs=1e-6), name
    if method == "dpo":
        assert found["base"]["loss"] == pytest.approx(0.693147, abs=1e-6)
    said = call("eval", tmp_path / "run").output
    assert f"accuracy {last['correct']:.0f}/4, margin" in said
    assert "perplexity" not in said
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["best_margin"]["margin"] == max(entry["margin"] for entry in metrics["trajectory"])


@pytest.mark.parametrize(
    "settings",
    [
        ("method=dpo", "dpo.reference=cached"),
        ("method=dpo", "dpo.reference=online"),
        ("method=dpo", "init_adapter=FROZEN", "dpo.reference_adapter=FROZEN"),
        ("method=orpo",),
        ("method=simpo", "lora.rslora=true"),
    ],
    ids=str,
)
def test_a_stopped_run_resumes_bit_for_bit(settings, model, data, tmp_path, frozen):
    settings = [item.replace("FROZEN", str(frozen)) for item in settings]
    whole = write_config(tmp_path / "whole.yaml", model, data, tmp_path / "whole")
    train(load_config(whole, settings))
    cut = write_config(tmp_path / "cut.yaml", model, data, tmp_path / "cut")
    cancel = threading.Event()
    stop = lambda event: cancel.set() if event["event"] == "train" and event["step"] == 3 else None  # noqa: E731
    assert train(load_config(cut, settings), stop, cancel=cancel).step == 3
    # As if the cache had been emptied in between.
    for file in (tmp_path / "cache").rglob("*.safetensors"):
        file.unlink()
    call("train", tmp_path / "cut", "--resume")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert adapter_bytes(tmp_path / "cut") == adapter_bytes(tmp_path / "whole")


def test_sharing_the_prompt_changes_the_tokens_and_not_the_numbers(model, data, tmp_path):
    for sharing in ("tree", "off"):
        config = write_config(tmp_path / f"{sharing}.yaml", model, data, tmp_path / sharing, steps=4, save_every=0)
        settings = ("--set", f"prompt_sharing={sharing}", "--set", "lora.dropout=0")
        call("train", config, "--method", "dpo", *settings)
    tree, off = (losses(tmp_path / sharing) for sharing in ("tree", "off"))
    assert tree == pytest.approx(off, rel=1e-4)
    tokens = [read_events(tmp_path / sharing)[0]["tokens"] for sharing in ("tree", "off")]
    assert tokens[0] < tokens[1]


GOOD = {"prompt": "abc", "chosen": "cba", "rejected": "abd"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"rejected": "cba"}, "chosen and rejected are equal"),
        ({"chosen": ""}, "the chosen answer is empty"),
        ({"rejected": "  "}, "the rejected answer is empty"),
        ({"rejected": None}, "rejected"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a" * 40}, "the prompt leaves no room for its answers"),
    ],
    ids=["equal", "empty chosen", "empty rejected", "missing side", "empty prompt", "long prompt"],
)
def test_bad_pairs_stop_a_run_before_it_starts(row, said, model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(r) for r in (GOOD, {**GOOD, **row}, GOOD)) + "\n")
    config = write_config(tmp_path / "run.yaml", model, rows, tmp_path / "run", max_tokens=24)
    result = call("train", config, "--method", "dpo", code=2)
    assert said in result.stderr
    assert "rows.jsonl:2" in result.stderr
    assert not (tmp_path / "run").exists()
    if "prompt" not in row:
        dropped = call("train", config, "--method", "dpo", "--set", "bad_rows=drop", "--set", "train.steps=1")
        assert "dropped 1" in dropped.output


def test_a_row_without_one_side_names_the_columns_that_are_there(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "abc", "chosen": "cba"}) + "\n")
    config = write_config(tmp_path / "run.yaml", model, rows, tmp_path / "run")
    assert "rows.jsonl:1" in call("train", config, "--method", "dpo", code=2).stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dpo.label_smoothing", "0.1, loss: ipo"),
        ("train.loss_normalisation", "sequence"),
        ("dpo.reference_adapter", "nowhere"),
        ("simpo.beta", "0"),
    ],
)
def test_settings_without_a_meaning_are_refused(key, value, model, data, tmp_path):
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run")
    overrides = [f"{key}={value}"]
    if "ipo" in value:
        overrides = ["dpo={label_smoothing: 0.1, loss: ipo}"]
    said = call("train", config, "--method", "dpo", *(f"--set={item}" for item in overrides), code=2).stderr
    assert (value if value == "nowhere" else key) in said


def test_supervised_rows_are_no_pairs(model, tmp_path):
    config = write_config(tmp_path / "run.yaml", model, write_rows(tmp_path / "rows"), tmp_path / "run")
    assert "train.jsonl" in call("train", config, "--method", "orpo", code=2).stderr


def test_eval_measures_a_model_alone_on_pairs(model, data):
    found = json.loads(call("eval", model, "--data", data / "valid.jsonl", "--method", "dpo", "--json").stdout)
    assert found["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert found["pairs"] == 4
    online = call("eval", model, "--data", data / "valid.jsonl", "--method", "dpo", "--set", "dpo.reference=online")
    assert "accuracy" in online.output


def test_init_writes_the_section_of_the_method_that_fits(data, tmp_path):
    call("init", data, "--file", tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    assert "dpo:  #" in text and "orpo:" not in text
    assert load_config(tmp_path / "run.yaml").method == "dpo"
