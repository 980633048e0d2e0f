"""Ranks by sensitivity, as `longtune plan` shows them before a run."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from longtune.cli import app
from tests.tiny_run import write_model


def test_plan_shows_the_ranks_that_a_run_would_have(tmp_path):
    model = write_model(tmp_path / "model")
    figures = [
        {"layer_name": f"model.layers.{layer}.self_attn.q_proj", "sensitivities": {"4": kl}}
        for layer, kl in enumerate((0.1, 0.3))
    ]
    (tmp_path / "kl.json").write_text(json.dumps(figures))
    keys = ["model", str(model)], ["tokens", "32"], ["set", "lora.rank_policy=by_kl"], ["set", "lora.rank=8"]
    command = ["plan", *(text for key, value in keys for text in (f"--{key}", value)), "--set", "device=cpu"]
    fitting = [*command, "--set", f"lora.sensitivity={tmp_path / 'kl.json'}", "--json"]
    result = CliRunner().invoke(app, fitting)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["ranks"]
    assert found["policy"] == "by_kl" and found["base"] == 8
    (row,) = (row for row in found["rows"] if row["module"] == "self_attn.q_proj")
    # Median 0.2: factors 0.5 and 1.5.
    assert (row["rank_low"], row["rank_high"], row["kl_low"], row["kl_high"]) == (4, 12, 0.1, 0.3)
    assert "12 of 14 targets have no sensitivity" in found["notes"][0]
    lines = result.stderr.splitlines()
    assert any(line.split()[:2] == ["self_attn.q_proj", "-"] and line.endswith("4 to 12") for line in lines)
    without = CliRunner().invoke(app, command)
    assert "there are no sensitivities" in without.output and "14 modules of rank 8" in without.output
