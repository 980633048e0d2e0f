"""`longtune export` through the command line: from a run to what peft and transformers load; refusals, exit codes."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from longtune.cli import app
from longtune.export import verify
from longtune.export.peft import write
from longtune.model.adapter_files import Update
from tests.tiny_run import write_config, write_model, write_rows

TOKENS = torch.arange(6, 25)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run with uneven ranks by sensitivity, and rsLoRA."""
    folder = tmp_path_factory.mktemp("run")
    kl = [
        {"layer_name": f"model.layers.{layer}.self_attn.{name}_proj", "sensitivities": {"4": 0.1 * number, "8": 0.001}}
        for layer in range(2)
        for number, name in enumerate("qkvo", 1 + layer)
    ]
    (folder / "kl.json").write_text(json.dumps(kl))
    data = write_rows(folder / "data")
    config = write_config(folder / "run.yaml", model, data, folder / "run", steps=4, learning_rate=0.1, save_every=2)
    values = yaml.safe_load(config.read_text())
    values["lora"] |= {"rank_policy": "by_kl", "sensitivity": str(folder / "kl.json"), "rslora": True, "rank": 8}
    config.write_text(yaml.safe_dump(values))
    call("train", config)
    return folder / "run"


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def as_json(*arguments, code=0):
    return json.loads(call(*arguments, "--json", code=code).stdout.splitlines()[-1])


def logits(base, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def test_a_run_by_sensitivity_records_its_ranks_and_says_what_had_no_figure(run):
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    meta = events[0]["ranks"]
    assert meta == json.loads((run / "plan.json").read_text())["ranks"]
    assert meta["policy"] == "by_kl" and meta["base"] == 8 and meta["modules"] == 14
    rows = {row["module"]: row for row in meta["rows"]}
    # Figures 0.1 to 0.5, median 0.3: the value projections have 0.3 and 0.4.
    assert (rows["self_attn.v_proj"]["rank_low"], rows["self_attn.v_proj"]["rank_high"]) == (8, 11)
    assert (rows["self_attn.q_proj"]["rank_low"], rows["self_attn.o_proj"]["rank_high"]) == (4, 14)
    assert rows["mlp.up_proj"]["kl_low"] is None and rows["mlp.up_proj"]["rank_high"] == 8
    said = [event["reason"] for event in events if event["event"] == "warning"]
    assert any("6 of 14 targets have no sensitivity" in reason for reason in said)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["rank_pattern"][r"model\.layers\.1\.self_attn\.o_proj"] == 14 and not config["alpha_pattern"]


def test_a_run_becomes_an_adapter_and_a_merged_model_with_its_logits(run, model, tmp_path):
    done = as_json("export", run, "--out", tmp_path / "adapter")
    assert done["largest_difference"] <= done["allowed_difference"] < done["adapter_effect"]
    truth = logits(model, run / "adapter")
    torch.testing.assert_close(logits(model, tmp_path / "adapter"), truth, rtol=1e-6, atol=1e-6)
    text = call("export", run, "--to", "merged", "--dtype", "fp32", "--out", tmp_path / "merged").stdout
    assert "largest logit difference from base + adapter" in text
    torch.testing.assert_close(logits(tmp_path / "merged"), truth, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_is_a_target_and_runs_are_added_with_a_weight(run, model, tmp_path):
    step = run / "checkpoints" / "step-00002"
    call("export", step, "--out", tmp_path / "both", "--with", f"{run}:0.5", "--prompt", "abc abc")
    ranks = {
        name: tensor.shape[0]
        for name, tensor in load_file(tmp_path / "both" / "adapter_model.safetensors").items()
        if "lora_A" in name
    }
    alone = load_file(step / "adapter_model.safetensors")
    assert ranks == {name: 2 * tensor.shape[0] for name, tensor in alone.items() if "lora_A" in name}


def test_even_ranks_are_for_readers_of_one_rank(run, model, tmp_path):
    call("export", run, "--out", tmp_path / "even", "--even-ranks")
    config = json.loads((tmp_path / "even" / "adapter_config.json").read_text())
    assert config["r"] == 14 and not config["rank_pattern"]
    truth = logits(model, run / "adapter")
    torch.testing.assert_close(logits(model, tmp_path / "even"), truth, rtol=1e-5, atol=1e-5)


def test_what_exists_is_left_alone_unless_forced(run, tmp_path):
    call("export", run, "--out", tmp_path / "out")
    assert "--force" in call("export", run, "--out", tmp_path / "out", code=2).output
    call("export", run, "--out", tmp_path / "out", "--force")
    assert "which is read" in call("export", run, "--out", run, "--force", code=2).output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "onnx", "--dtype", "int4"], ["onnx", "int4"]),
        (["--with", "{run}:much"], ["is no weight"]),
        (["--with", "{run}/nowhere"], ["no such folder"]),
        (["--with", "{run}:nan"], ["nan is no weight"]),
    ],
)
def test_bad_requests_are_named_and_leave_nothing(run, tmp_path, options, said):
    options = [option.replace("{run}", str(run)) for option in options]
    output = call("export", run, "--out", tmp_path / "out", *options, code=2).output
    assert all(text in output for text in said)
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_names_no_model_asks_for_it(tmp_path, model):
    (tmp_path / "a").mkdir()
    updates = {"model.layers.0.self_attn.q_proj": Update(torch.randn(2, 32), torch.randn(32, 2), 1.0)}
    write(tmp_path / "a", updates, targets=list(updates), base="", rslora=False)
    assert "--model MODEL" in call("export", tmp_path / "a", "--out", tmp_path / "out", code=2).output
    call("export", tmp_path / "a", "--out", tmp_path / "out", "--model", model)


def test_an_export_that_differs_exits_with_1_and_is_kept_aside(run, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "LOSSLESS", dict.fromkeys(verify.LOSSLESS, -1.0))
    assert "differs from base + adapter" in call("export", run, "--out", tmp_path / "out", code=1).output
    assert [path.name for path in tmp_path.iterdir()] == ["out.failed"]


def test_a_run_without_figures_says_that_it_falls_back(model, tmp_path):
    data = write_rows(tmp_path / "data")
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", steps=1)
    call("train", config, "--set", "lora.rank_policy=by_kl")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "there are no sensitivities, so ranks follow the base rank" in text
    other = ["--output", str(tmp_path / "other"), "--set", "lora.rank_policy=by_kl"]
    bad = call("train", config, *other, "--set", "lora.sensitivity=none.json", code=2)
    assert "there is no such file" in bad.output
