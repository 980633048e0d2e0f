"""`longtune sensitivity`, `longtune quantise`, and runs on what they write, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from longtune.cli import app
from longtune.model.loading import load_model
from longtune.model.packed import PackedLinear, bits_of
from tests.model.packed import support
from tests.tiny_run import losses, write_config, write_rows


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, rows, and the model's figures."""
    folder = tmp_path_factory.mktemp("quantise")
    support.write_plain(folder / "model", "llama", tie_word_embeddings=True)
    write_rows(folder / "rows")
    measure(folder)
    return folder


def measure(folder: Path, *more: object) -> str:
    code, output = run(
        "sensitivity",
        folder / "model",
        *("--data", folder / "rows" / "train.jsonl", "--group-size", 32, "--tokens", 200),
        *("--out", folder / "figures.json", "--set", "dtype=float32", "--set", "device=cpu"),
        *more,
    )
    assert code == 0, output
    return output


def test_figures_are_written(place):
    figures = json.loads((place / "figures.json").read_text())
    assert len(figures) == 2 * 7 + 1
    assert figures[0]["layer_name"] == "model.embed_tokens"
    assert all(entry["sensitivities"]["4"] > 0 for entry in figures)
    assert not (place / "figures.json.partial").exists()


def test_a_stopped_measurement_goes_on(place, monkeypatch, tmp_path):
    from longtune.quantise import sensitivity as room

    whole = json.loads((place / "figures.json").read_text())
    real, asked = room._Prober.divergence_of, []

    def stopping(self, unit, format):
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append(unit.name)
        return real(self, unit, format)

    monkeypatch.setattr(room._Prober, "divergence_of", stopping)
    out = tmp_path / "again.json"
    arguments = ["sensitivity", place / "model", "--data", place / "rows" / "train.jsonl", "--group-size", 32]
    arguments += ["--tokens", 200, "--out", out, "--set", "dtype=float32", "--set", "device=cpu"]
    assert run(*arguments)[0] == 130
    assert not out.exists() and len((tmp_path / "again.json.partial").read_text().splitlines()) == 6
    code, output = run(*arguments[:-4], "--set", "dtype=bfloat16", "--set", "device=cpu")
    assert code == 2 and "another model, dtype" in output
    code, output = run(*arguments[:4], "--group-size", 16, *arguments[6:])
    assert code == 2 and "another group size" in output
    monkeypatch.setattr(room._Prober, "divergence_of", lambda *a: (asked.append(a[1].name), real(*a))[1])
    code, output = run(*arguments)
    assert code == 0 and "5 figures of an earlier run are used" in output
    assert len(asked) == len(set(asked)) == 15
    assert json.loads(out.read_text()) == whole


def test_a_mixed_model_is_written_loaded_and_trained(place, tmp_path):
    out = tmp_path / "mixed"
    arguments = ["quantise", place / "model", "--out", out, "--group-size", 32, "--sensitivity", place / "figures.json"]
    arguments += ["--high-bits", 8]
    asked = [str(argument) for argument in [*arguments, "--target-bpw", 7.5, "--json"]]
    result = json.loads(CliRunner().invoke(app, asked).stdout)
    assert result["exit_code"] == 0, result
    assert result["bits_per_weight"] <= 7.5 and 0 < result["high"] < result["modules"]
    model = load_model(str(out), dtype="float32", device="cpu").model
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedLinear)
    assert {bits_of(model.get_submodule(name)) for name in result["bits"]} == {4, 8}
    assert run(*arguments)[0] == 2

    config = write_config(tmp_path / "run.yaml", out, place / "rows", tmp_path / "run", steps=4, eval_every=0)
    code, output = run("train", config, "--set", "lora.rank_policy=by_bits")
    assert code == 0, output
    steps = losses(tmp_path / "run")
    assert len(steps) == 4 and steps[4] < steps[1]
    patterns = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["rank_pattern"]
    assert set(patterns.values()) == {8}
    code, output = run("eval", tmp_path / "run", "--base")
    assert code == 0, output


@pytest.mark.parametrize(("low", "widths"), [(4, {4, 5, 6, 8}), (5, {5, 6, 8})])
def test_high_widths_are_those_above_the_low_one(low, widths, place, tmp_path):
    figures = json.loads((place / "figures.json").read_text())
    for number, entry in enumerate(figures):
        entry["sensitivities"] = {str(low): 2.0**-number}
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    arguments = ["quantise", place / "model", "--out", tmp_path / "out", "--group-size", 32, "--bits", low]
    arguments += ["--sensitivity", tmp_path / "figures.json", "--target-bpw", 8, "--json"]
    result = json.loads(CliRunner().invoke(app, [str(argument) for argument in arguments]).stdout)
    assert set(result["bits"].values()) == widths


def test_a_uniform_model_needs_no_figures(place, tmp_path):
    code, output = run(
        "quantise", place / "model", "--out", tmp_path / "u", "--group-size", 32, "--uniform", "--bits", 3
    )
    assert code == 0, output
    assert "15 modules, 15 at 3 bits, 5." in output
    model = load_model(str(tmp_path / "u"), dtype="float32", device="cpu").model
    assert torch.isfinite(support.logits(model)).all()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--bits", 7], "no width of 7 bits"),
        (["--bits", 4, "--high-bits", 4], "is not above --bits 4"),
        ([], "comes without figures"),
        (["--bits", 8], "8 is not above --bits 8"),
        (["--high-bits", "5,9"], "--high-bits 5,9: affine has no width of 9 bits"),
        (["--uniform", "--sensitivity", "x.json"], "uses no sensitivities"),
        (["--sensitivity", "x.json"], "x.json: can't be read"),
        (["--sensitivity", "FIGURES", "--target-bpw", 2], "at 4 bits everywhere the model takes"),
    ],
)
def test_what_can_not_be_quantised(arguments, reason, place, tmp_path):
    given = [place / "figures.json" if argument == "FIGURES" else argument for argument in arguments]
    code, output = run("quantise", place / "model", "--out", tmp_path / "out", "--group-size", 32, *given)
    assert code == 2 and reason in output, output
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_quantised_already(place, tmp_path):
    assert run("quantise", place / "model", "--out", tmp_path / "u", "--group-size", 32, "--uniform")[0] == 0
    code, output = run("quantise", tmp_path / "u", "--out", tmp_path / "again", "--uniform")
    assert code == 2 and "is quantised already" in output
    code, output = run("sensitivity", tmp_path / "u", "--data", place / "rows", "--out", tmp_path / "s.json")
    assert code == 2 and "is quantised already" in output


@pytest.mark.parametrize("bits", ["9", "four", "4,", ""])
def test_widths_that_there_are_not(bits, place, tmp_path):
    code, output = run(
        "sensitivity", place / "model", "--data", place / "rows", "--bits", bits, "--out", tmp_path / "s.json"
    )
    assert code == 2 and "--bits" in output


@pytest.mark.libraries
@pytest.mark.parametrize("way", ["nf4", "int8"])
def test_a_run_may_quantise_its_base_on_loading(way, place, tmp_path):
    pytest.importorskip("bitsandbytes", reason="nf4 and int8 are the work of bitsandbytes")
    config = write_config(
        tmp_path / "run.yaml", place / "model", place / "rows", tmp_path / "run", steps=2, eval_every=1
    )
    wish = ("--set", f"quantise_on_load={way}")
    code, output = run("plan", config, *wish)
    assert code == 0 and "fits" in output, output
    # A budget has the planner walk the model without memory, and in chunks.
    code, output = run("train", config, *wish, "--set", "lora.rank_policy=by_bits", "--set", "memory=4GB")
    assert code == 0, output
    assert len(losses(tmp_path / "run")) == 2
    code, output = run("eval", tmp_path / "run")
    assert code == 0, output
    code, output = run("export", tmp_path / "run", "--to", "peft", "--out", tmp_path / "exported")
    assert code == 0 and f"stored as {way}" in output, output


@pytest.mark.libraries
@pytest.mark.parametrize("way", ["nf4", "int8"])
def test_chunks_change_no_loss_on_a_base_that_is_quantised_on_loading(way, place, tmp_path):
    pytest.importorskip("bitsandbytes", reason="nf4 and int8 are the work of bitsandbytes")
    found = []
    for chunk in ("null", "8"):
        out = tmp_path / chunk
        config = write_config(tmp_path / f"{chunk}.yaml", place / "model", place / "rows", out, steps=2, eval_every=0)
        wishes = (
            "--set",
            f"quantise_on_load={way}",
            "--set",
            "lora.dropout=0",
            "--set",
            f"memory.chunk_tokens={chunk}",
        )
        code, output = run("train", config, *wishes)
        assert code == 0, output
        found.append(losses(out))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_base_that_is_packed_can_not_be_quantised_on_loading(place, tmp_path):
    assert run("quantise", place / "model", "--out", tmp_path / "u", "--group-size", 32, "--uniform")[0] == 0
    config = write_config(tmp_path / "run.yaml", tmp_path / "u", place / "rows", tmp_path / "run")
    code, output = run("train", config, "--set", "quantise_on_load=nf4")
    assert code == 2 and "is an MLX checkpoint, which keeps its own format" in output
    code, output = run("train", config, "--set", "quantise_on_load=nf5")
    assert code == 2 and "quantise_on_load" in output
