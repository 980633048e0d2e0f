"""The run's key `compile`: what auto decides, that a run follows it, and a compiler that fails."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import longtune.train.planning as planning
from longtune.config import load_config
from longtune.engine import Plan
from longtune.engine.forecast import Row
from longtune.errors import UserError
from longtune.train import train
from tests.tiny_run import losses, read_events, write_config, write_model, write_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture
def config(tmp_path):
    model = write_model(tmp_path / "model")
    return write_config(tmp_path / "run.yaml", model, write_rows(tmp_path / "data"), tmp_path / "run")


def decided(config, data, *, chunk, tokens, saved, steps, key="auto"):
    settings = load_config(config, [f"train.steps={steps}", f"compile={str(key).lower()}", "train.accumulate=2"])
    seconds = SimpleNamespace(total=5.0), SimpleNamespace(total=5.0 - saved)
    chosen = SimpleNamespace(plan=Plan(chunk_tokens=chunk), seconds=seconds[0], compiled=seconds[1])
    return planning._compiling(settings, data, cast(Any, chosen), Row(tokens))


def test_auto_compiles_long_rows_of_long_runs(config):
    data = cast(Any, [SimpleNamespace(size=9)] * 12)
    long = dict(chunk=8192, tokens=32768, saved=0.5)
    assert decided(config, data, **long, steps=1000) == (
        True,
        "; layers compiled, which saves about 1 s of each step",
    )
    assert decided(config, data, **long, steps=30) == (False, "")
    assert decided(config, data, **{**long, "saved": 0.0}, steps=1000) == (False, "")
    assert decided(config, data, **{**long, "tokens": 9000}, steps=1000) == (False, "")
    assert decided(config, data, **{**long, "chunk": None}, steps=1, key=True)[0]
    assert decided(config, data, **long, steps=1000, key=False) == (False, "")


def test_auto_compiles_rows_of_one_chunk_once_for_all_sizes(config):
    data = cast(Any, [SimpleNamespace(size=9)] * 12)
    for chunk in (None, 16384):
        rows = dict(chunk=chunk, tokens=16384, saved=0.5)
        assert decided(config, data, **rows, steps=100)[0]
        # That takes longer than compiling for one size.
        assert not decided(config, data, **rows, steps=60)[0]
    assert decided(config, data, chunk=8192, tokens=16384, saved=0.5, steps=60)[0]


def test_a_run_compiles_as_it_is_told_and_says_so(config, tmp_path, monkeypatch):
    compile, made = torch.compile, []

    def plainly(model, **options):
        made.append(options)
        return compile(model, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", plainly)
    keys = ["lora.dropout=0", "memory={chunk_tokens: 16, keep: attention}", "train.steps=2", "train.save_every=1"]
    train(load_config(config, [*keys, "compile=false"]))
    assert not made
    plain = losses(tmp_path / "run")
    again = load_config(config, [*keys, "compile=true", f"output={tmp_path / 'compiled'}"])
    train(again)
    assert made
    assert losses(tmp_path / "compiled") == pytest.approx(plain, rel=1e-5)
    stored = json.loads((tmp_path / "compiled" / "plan.json").read_text())
    assert stored["compile"] is True and "as the config says" in stored["reason"]


@pytest.mark.parametrize("key", ["auto", "true"])
def test_a_compiler_that_fails(config, tmp_path, monkeypatch, key):
    def failing(graph, inputs, **options):
        raise RuntimeError("no compiler here")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile(model, backend=failing, **options))
    monkeypatch.setattr(planning, "_compiling", lambda *args: (True, "; layers compiled"))
    keys = ["lora.dropout=0", "memory={chunk_tokens: 16, keep: attention}", "train.steps=2", f"compile={key}"]
    if key == "true":
        with pytest.raises(UserError, match="no compiler here"):
            train(load_config(config, keys))
        return
    train(load_config(config, keys))
    told = [e["reason"] for e in read_events(tmp_path / "run") if e["event"] == "warning"]
    assert len([reason for reason in told if "no compiler here" in reason and "goes on without" in reason]) == 1
    assert len(losses(tmp_path / "run")) == 2
