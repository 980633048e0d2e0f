"""The demo on pairs, on a tiny random model: its files, its figures and its report."""

from __future__ import annotations

import json

import pytest

import longtune.demo
from longtune.config import load_config
from longtune.demo import pairs
from longtune.demo.tickets import FIELDS
from longtune.model.adapters import load_adapter
from longtune.model.loading import load_model
from tests.tiny_run import write_model


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The demo on a model of some thousand weights, with few rows."""
    name = str(write_model(tmp_path / "model"))
    for constant, value in (("EMBEDDED", name), ("PAIRS", 8), ("HELD_OUT", 6)):
        monkeypatch.setattr(pairs, constant, value)
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path / "cache"))
    return name


@pytest.mark.parametrize("method", pairs.METHODS)
def test_the_demo_on_pairs_is_a_run_like_any_other(method, small, tmp_path):
    events, lines = [], []
    output = tmp_path / "run"
    result = longtune.demo.run(method, output, steps=2, on_event=events.append, write=lines.append)
    kinds = [event["event"] for event in events]
    assert [kind for kind in kinds if kind not in ("reference", "warning")] == ["meta", "train", "train", "done"]
    assert events[-2]["pairs"] == pairs.BATCH
    assert load_config(output).method == method
    rows = [json.loads(line) for line in (output / "data" / "test.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["chosen"] != row["rejected"] for row in rows)
    for score in (result["before"], result["after"]):
        assert score["pairs"] == 6 and score["accuracy"] == score["correct"] / 6
        assert tuple(score["by_field"]) == FIELDS
        assert sum(count for _, count in score["by_field"].values()) == 6
        assert sum(right for right, _ in score["by_field"].values()) == score["correct"]
    assert result["before"]["margin"] != result["after"]["margin"]
    assert json.loads(json.dumps(result)) == result
    assert load_adapter(load_model(small, dtype="float32").model, result["adapter"])
    report = "\n".join(lines)
    assert f"right answer preferred {result['after']['correct']}/6" in report
    assert result["adapter"] in report and rows[0]["rejected"][0]["content"] in report
