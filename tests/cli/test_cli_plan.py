"""`longtune plan`, and what training makes of it: predictions in plan.json, memory events, a plan made anew."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import longtune
from longtune.cli import app
from longtune.cli.output import stages
from longtune.config import load_config
from longtune.engine import Engine, Plan
from longtune.errors import DoesNotFit
from longtune.train import planning, train
from tests.tiny_run import losses, read_events, write_config, write_model, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def config(model, data, tmp_path):
    return write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", steps=2, accumulate=1)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def last_object(result):
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_a_run_that_fits_is_planned_without_its_weights(config, model, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights are read")

    monkeypatch.setattr(planning, "load_model", refuse)
    result = call("plan", config, "--json")
    found = last_object(result)
    assert found["fits"] and found["exit_code"] == 0
    assert found["plan"]["keep"] == "everything" and found["plan"]["chunk_tokens"] == 16
    assert found["run_seconds"] > 0 and found["seconds_per_step"] > 0
    assert found["largest_row"] > found["tokens"]
    for word in ("fits", "plan", "memory", "frozen weights", "time", "longest"):
        assert word in result.stderr


def test_a_run_that_does_not_fit_leaves_with_3_and_fixes_that_work(config):
    # Context, libraries and the least slack alone take 810 MB.
    call_ = ["plan", config, "--device", "rtx4090", "--device-memory", "811MB", "--json", "--tokens", 9000]
    call_ += ["--set", "memory=auto"]
    found = last_object(call(*call_, code=3))
    assert not found["fits"] and found["fixes"]
    fix = next(fix for fix in found["fixes"] if "max_tokens" in fix)
    shorter = int(fix.split(" to ")[1].split()[0])
    assert longtune.plan(
        load_config(config, ["memory=auto"]), device="rtx4090", device_memory="811MB", tokens=shorter
    ).fits
    # The same by the letter of the fix.
    followed = last_object(call(*call_, "--set", f"train.max_tokens={shorter}"))
    assert followed["fits"] and followed["tokens"] == shorter


def test_a_budget_and_keys_of_the_plan_hold_together(config):
    # As in the config, which gives chunks of 16, so from the command line.
    for keys in ([], ["--set", "memory={chunk_tokens: 16}"]):
        found = last_object(call("plan", config, *keys, "--memory", "2GB", "--json"))
        assert found["plan"]["chunk_tokens"] == 16 and found["budget"]["device"] <= 2e9
    found = last_object(call("plan", config, "--set", "memory=auto", "--memory", "2GB", "--json"))
    assert found["budget"]["device"] <= 2e9
    assert "write it like 24GB" in call("plan", config, "--memory", "abc", code=2).output


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{keep: everything, keep_layers: 99}", "the model has"),
        ("{layers_per_segment: 99}", "the model has"),
        ("{keep: nothing, keep_below: attention}", "keep_layers, which is not given"),
    ],
)
def test_keys_without_an_effect_are_refused(config, keys, message):
    for command in ("plan", "train"):
        assert message in call(command, config, "--set", f"memory={keys}", code=2).output


def test_a_plan_says_what_the_layers_below_keep(config):
    words = call("plan", config, "--set", "memory={keep: nothing, keep_layers: 1, keep_below: attention}").output
    assert "nothing of the last 1 layer kept, attention outputs of the others" in words


@pytest.mark.parametrize(("device", "said"), [("h200", True), ("cpu", False)])
def test_time_that_the_host_decides_is_said(config, device, said):
    # Of so small a model every operation is shorter than its launch.
    options = [] if device == "cpu" else ["--device", device]
    result = call("plan", config, "--tokens", 64, *options)
    assert ("a busy host takes longer" in result.output) is said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "512", "--device", "abacus"], "abacus"),
        (["--tokens", "512", "--device-memory", "much"], "much"),
        ([], "neither a config nor data"),
    ],
)
def test_what_cannot_be_planned_is_said(model, arguments, message):
    result = call("plan", "--model", model, *arguments, code=2)
    assert message in result.output


@pytest.mark.parametrize(
    ("most", "tokens", "planned", "said"),
    [
        (100, 500, 100, "stops a run: planned for 100"),
        (100, 100, 100, None),
        (600, 500, 500, None),
        (None, 500, 500, None),
        (None, 200_000, 200_000, "train.max_tokens=200000"),
    ],
)
def test_a_row_is_planned_as_long_as_the_run_lets_it_be(config, most, tokens, planned, said):
    overrides = ["memory=auto", *([f"train.max_tokens={most}"] if most else [])]
    assert planning.row_of(tokens, load_config(config, overrides))[0] == planned
    options = [part for override in overrides for part in ("--set", override)]
    result = call("plan", config, "--tokens", tokens, *options, "--device", "h200")
    assert f"a row of {planned:,} tokens" in result.output
    assert ("train.max_tokens" in result.output) == (said is not None)
    assert said is None or said in result.output


def test_the_fate_of_longer_rows_is_told(config):
    loaded = load_config(config, ["train.max_tokens=100", "train.overlong=drop"])
    assert "is not trained whole (train.overlong: drop): planned for 100" in planning.row_of(500, loaded)[1]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"keep_below": "kv"}, ["keep_below"]),
        ({"keep_layers": 2, "keep": "everything"}, []),
        ({"keep_below": "nothing", "keep_layers": None, "halves": False}, []),
        ({"keep_below": "kv", "halves": True}, ["keep_below", "halves"]),
        ({"layers_per_segment": 2, "boundary_store": "host"}, ["layers_per_segment", "boundary_store"]),
        ({"layers_per_segment": 2, "boundary_store": "host", "keep": "attention"}, []),
        ({"layers_per_segment": 1, "boundary_store": "device"}, []),
        ({"keep": "nothing", "keep_layers": 2}, ["keep_layers"]),
    ],
)
def test_keys_that_the_chosen_plan_does_not_read_are_told(memory, said):
    told = planning._unused(Plan(**{"keep": "everything", **memory}), memory)
    assert len(told) == len(said)
    assert all(key in line for key, line in zip(said, told, strict=True))


def test_python_gets_the_same_plan(config):
    found = longtune.plan(load_config(config), tokens=64)
    assert found.fits and found.tokens == 64 and found.run_seconds is None
    assert found.as_dict()["plan"] == found.plan.as_dict()


def test_a_run_writes_what_was_predicted_and_what_was_measured(config, tmp_path):
    result = call("train", config, "--log", "memory")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["plan"]["chunk_tokens"] == 16
    assert plan["predicted"]["peak_bytes"] > 0 and plan["predicted"]["seconds_per_step"] > 0
    assert plan["measured"]["peak_bytes"] > 0
    events = read_events(tmp_path / "run")
    done = events[-1]
    assert done["predicted"]["peak_bytes"] == plan["predicted"]["peak_bytes"]
    assert "predicted" in result.output
    phases = [event["phase"] for event in events if event["event"] == "memory" and event["step"] == 1]
    assert phases[:3] == ["prologue", "forward", "head"] and "backward" in phases and phases[-1] == "done"
    assert all(event["active_bytes"] > 0 for event in events if event["event"] == "memory")


def test_keys_that_are_left_out_stay_left_out(config):
    loaded = load_config(config)
    assert loaded.to_dict()["memory"] == {"chunk_tokens": 16}
    assert planning.given_keys(loaded.memory) == {"chunk_tokens": 16}


def test_a_budget_too_small_for_a_run_is_refused_before_its_folder_is_made(config, tmp_path):
    with pytest.raises(DoesNotFit) as caught:
        train(load_config(config, ["memory=1MB"]))
    assert caught.value.exit_code == 3
    (problem,) = caught.value.problems
    assert "tokens" in problem.reason and problem.fix
    assert not (tmp_path / "run").exists()


def out_of_memory_once(monkeypatch, times=1):
    left = [times]
    accumulate = Engine.accumulate

    def failing(self, *args, **kwargs):
        if left[0] and self.stack.device.type == "cpu":
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return accumulate(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "accumulate", failing)


def test_a_step_that_runs_out_of_memory_is_planned_anew_and_taken(config, tmp_path, monkeypatch):
    usual = load_config(config, [f"output={tmp_path / 'usual'}", "lora.dropout=0"])
    train(usual)
    planned = planning.plan_run
    asked = []

    def less(config, engine, data, at_most=None):
        found = planned(config, engine, data)
        if at_most is None:
            return found
        asked.append(at_most / found.predicted["needed_bytes"])
        return planning.replace(found, plan=planning.replace(found.plan, keep="nothing"))

    monkeypatch.setattr("longtune.train.run.plan_run", less)
    out_of_memory_once(monkeypatch)
    train(load_config(config, ["lora.dropout=0"]))
    events = read_events(tmp_path / "run")
    (event,) = [event for event in events if event["event"] == "replanned"]
    assert event["step"] == 1 and event["plan"]["keep"] == "nothing" and "out of memory" in event["reason"]
    assert asked and asked[0] == pytest.approx(0.88, abs=0.1)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "usual"), rel=1e-5)
    # A resumed run goes on by it.
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]["keep"] == "nothing"


def test_where_no_plan_is_smaller_the_same_one_is_tried_once_more(config, tmp_path, monkeypatch):
    out_of_memory_once(monkeypatch)
    train(load_config(config, ['memory={"chunk_tokens": 16, "keep": "nothing", "layers_per_segment": 1}']))
    events = read_events(tmp_path / "run")
    (event,) = [event for event in events if event["event"] == "replanned"]
    assert "once more" in event["plan_reason"] and events[-1]["event"] == "done"


def test_a_second_failure_ends_the_run(config, tmp_path, monkeypatch):
    out_of_memory_once(monkeypatch, times=5)
    with pytest.raises(DoesNotFit):
        train(load_config(config))
    assert read_events(tmp_path / "run")[-1]["event"] == "failed"


def test_a_resumed_run_keeps_its_plan(config, tmp_path, monkeypatch):
    train(load_config(config, ["train.stop_after=0.001"]))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]

    def refuse(*args, **kwargs):
        raise AssertionError("a resumed run is planned anew")

    monkeypatch.setattr("longtune.train.prepare.plan_run", refuse)
    train(load_config(tmp_path / "run", ["train.stop_after=null"]), resume=True)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["plan"] == plan


def test_what_is_being_done_is_told_and_shown_on_a_terminal_alone(config, monkeypatch, capsys):
    told = []
    longtune.plan(load_config(config), tokens=64, on_stage=told.append)
    assert len(told) == len(set(told)) > 3 and any("fastest plan" in what for what in told)
    with stages(quiet=False) as say:
        say("working")
        say(None)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for quiet in (True, False):
        with stages(quiet) as say:
            say("working")
        assert ("working" in capsys.readouterr().err) is not quiet


def test_figures_are_in_gib(config):
    result = call("plan", config, "--device", "rtx4090", "--device-memory", "10GB", "--tokens", 64)
    assert "of 9.31 GiB" in result.output and " GB" not in result.output
