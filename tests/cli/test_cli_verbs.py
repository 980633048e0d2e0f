"""The other verbs through the real command line: init, eval, chat, doctor, and every verb's help."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from longtune.cli import app
from longtune.config import load_config
from tests.tiny_run import write_config, write_model, write_rows

VERBS = ["demo", "init", "check", "plan", "train", "watch", "report", "eval", "chat", "doctor", "export"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="module")
def run(model, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder / "run.yaml", model, data, folder / "run", steps=8, learning_rate=0.1)
    assert CliRunner().invoke(app, ["train", str(config)]).exit_code == 0
    return folder / "run"


def call(*arguments, code=0, **options):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS)])
def test_help_fits_a_screen(verb):
    lines = call(*verb, "--help", env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("verb", ["quantise", "sensitivity"])
def test_longer_help_fits_the_width_of_a_screen(verb):
    assert max(map(len, call(verb, "--help", env={"COLUMNS": "80"}).stdout.splitlines())) <= 80


def test_the_list_of_verbs_cuts_no_description_short():
    lines = call("--help", env={"COLUMNS": "80"}).stdout.partition("Commands:")[2].splitlines()[1:]
    assert len(lines) == len(app.registered_commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_help_answers_at_once_because_nothing_heavy_is_imported():
    script = (
        "import sys; from longtune.cli import app; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True)
    assert time.perf_counter() - start < 2.0


def test_eval_of_a_run_uses_its_validation_data_and_compares_with_the_base(run):
    found = json.loads(call("eval", run, "--base", "--json").stdout)
    last = json.loads((run / "metrics.json").read_text())["validation"]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert found["rows"] == 5
    assert found["tokens"] == last["tokens"]
    assert found["base"]["loss"] > found["loss"]


def test_eval_of_a_model_and_of_an_adapter_folder(run, model, data):
    arguments = ["--data", data / "valid.jsonl", "--set", "dtype=float32", "--json"]
    alone = json.loads(call("eval", model, *arguments).stdout)
    tuned = json.loads(call("eval", run / "adapter", *arguments).stdout)
    assert tuned["loss"] < alone["loss"]
    assert alone["adapter"] is None


def test_eval_says_which_rows_it_used(run):
    found = json.loads(call("eval", run, "--rows", 2, "--json").stdout)
    assert (found["rows"], found["skipped"]) == (2, 3)


def test_eval_without_data_is_refused(model):
    assert "--data" in call("eval", model, code=2).stderr


def _no_model(*_, **__):
    raise AssertionError("the model was loaded first")


@pytest.mark.parametrize("base", [[], ["--base"]])
def test_eval_says_what_is_wrong_with_its_data_before_it_loads_the_model(base, run, model, tmp_path, monkeypatch):
    monkeypatch.setattr("longtune.model.loading.load_model", _no_model)
    shutil.copytree(run, tmp_path / "alone")
    train = write_rows(tmp_path / "data") / "train.jsonl"
    asked = ["--set", f"data={train}", "--set", "valid=null"]
    assert "there is no validation data" in call("eval", tmp_path / "alone", *base, *asked, code=2).stderr
    for name, text in (("empty", ""), ("broken", "{\n"), ("other", '{"prompt": 1}\n')):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(text)
        assert str(file) in call("eval", run, *base, "--data", file, code=2).stderr
        assert str(file) in call("eval", model, *base, "--data", file, code=2).stderr


@pytest.mark.parametrize("verb", [["eval"], ["chat", "--prompt", "a"]])
def test_a_target_that_is_not_there_is_said_before_anything_else(verb, run):
    said = call(verb[0], run.parent / "rum", *verb[1:], code=2).stderr
    assert "there is no such run, adapter or model" in said
    assert f"did you mean {run}" in said


@pytest.mark.parametrize("verb", [["eval"], ["chat", "--prompt", "a"]])
def test_an_adapter_with_values_that_are_not_finite_is_refused(verb, run, tmp_path):
    shutil.copytree(run, tmp_path / "broken")
    file = tmp_path / "broken" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    said = call(verb[0], tmp_path / "broken", *verb[1:], code=2).stderr
    assert "1 of its tensors hold values that are not finite" in said
    assert name in said


def test_eval_labels_what_it_compares(run):
    lines = call("eval", run, "--base").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[-3:-1]] == ["with the adapter", "without the adapter"]
    assert not any("adapter" in line for line in call("eval", run).stdout.splitlines())


def test_one_of_a_thing_is_not_several(run):
    said = call("eval", run, "--rows", 1).stdout
    assert "1 row (4 left out)" in said
    assert "1 rows" not in said


def test_chat_answers_once_with_and_without_the_adapter(run):
    found = json.loads(call("chat", run, "--prompt", "abc", "--compare", "--max-tokens", 6, "--json").stdout)
    assert found["prompt"] == "abc"
    assert found["answer"] != found["base_answer"]
    base = json.loads(call("chat", run, "--prompt", "abc", "--base", "--max-tokens", 6, "--json").stdout)
    assert base["answer"] == found["base_answer"]


def test_chat_says_that_an_answer_reached_the_limit(run):
    said = call("chat", run, "--prompt", "abc", "--compare", "--max-tokens", 1, "--json")
    found = json.loads(said.stdout)
    assert found["cut_off"] and found["base_cut_off"]
    assert said.stderr.count("(cut off at 1 token: --max-tokens allows more)") == 2


def test_chat_is_a_conversation_that_can_switch_the_adapter_off(run):
    said = call("chat", run, "--max-tokens", 4, input="abc\n/base\nabc\n/what\n/new\n/quit\n").stdout
    assert said.count("tuned> ") == 2
    assert said.count("base> ") >= 3


def test_chat_reads_a_prompt_from_stdin_and_continues_plain_text(model):
    found = json.loads(call("chat", model, "--prompt", "-", "--plain", "--max-tokens", 3, "--json", input="ab").stdout)
    assert found["prompt"] == "ab"
    assert isinstance(found["answer"], str)


@pytest.mark.parametrize(
    "arguments", [["chat", "--system"], ["chat", "--prompt"], ["export", "--out", "x", "--prompt"]]
)
def test_a_text_in_other_bytes_than_utf8_is_refused_before_anything_is_loaded(run, arguments, monkeypatch):
    monkeypatch.setattr("longtune.model.loading.load_model", _no_model)
    verb, *options = arguments
    said = call(verb, run, *options, "caf\udce9", code=2)
    assert f"{verb} {options[-1]}: is no text in UTF-8 (at character 4)" in said.stderr
    assert not said.stdout


def test_a_line_in_other_bytes_than_utf8_is_refused_and_chat_goes_on(model):
    asked = call("chat", model, "--prompt", "-", input=b"caf\xe9", code=2)
    assert "stdin: is no text in UTF-8" in asked.stderr
    talked = call("chat", model, "--max-tokens", 2, input=b"caf\xe9\n/quit\n")
    assert "that is no text in UTF-8" in talked.stderr


@pytest.mark.parametrize("arguments", [["--json"], ["--compare"]])
def test_chat_needs_a_prompt_for_one_answer(model, arguments):
    assert "--prompt" in call("chat", model, *arguments, code=2).stderr


def test_init_writes_a_config_that_loads_and_explains_itself(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("init", data, "--json")
    found = json.loads(result.stdout)
    assert found["formats"] == ["chat"]
    text = (tmp_path / "longtune.yaml").read_text()
    assert all("#" in line for line in text.splitlines() if line)
    config = load_config("longtune.yaml")
    assert config.data == str(data)
    assert config.method == "sft"
    assert config.to_dict() == found["config"]
    assert "exists already" in call("init", data, code=2).stderr
    call("init", data, "--force")


@pytest.mark.parametrize(
    "rows, expected", [(20, (None, 3.0)), (533, (None, 3.0)), (534, (200, None)), (2000, (200, None))]
)
def test_init_does_not_go_over_few_rows_again_and_again(rows, expected, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n' * rows)
    call("init", file, "--file", tmp_path / "c.yaml")
    config = load_config(tmp_path / "c.yaml")
    assert (config.train.steps, config.train.epochs) == expected


def test_init_renames_columns_and_says_what_it_cannot_read(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n')
    said = call("init", rows, "--file", tmp_path / "c.yaml", code=2).stderr
    assert "question=prompt" in said
    assert not (tmp_path / "c.yaml").exists()
    call("init", rows, "--file", tmp_path / "c.yaml", "--map", "question=prompt,answer=completion")
    assert load_config(tmp_path / "c.yaml").columns == {"question": "prompt", "answer": "completion"}


def test_doctor_reports_what_is_there_and_what_is_missing():
    result = call("doctor", "--json")
    found = json.loads(result.stdout)
    assert found["packages"]["torch"]
    assert found["attention"]["reason"]
    assert found["memory_bytes"]["total"] > 0
    assert all(found["missing"].values())
    assert "attention" in call("doctor").stdout


def test_an_unexpected_error_leaves_with_1_and_says_so_in_json(monkeypatch):
    monkeypatch.setattr("longtune.train.environment.describe", lambda device: 1 / 0)
    result = call("doctor", "--json", code=1)
    assert "ZeroDivisionError" in json.loads(result.stdout)["error"]


def test_a_run_that_fails_leaves_with_1(model, data, tmp_path, monkeypatch):
    from longtune.engine import Engine

    monkeypatch.setattr(Engine, "accumulate", lambda *_, **__: {"loss": float("nan")})
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run")
    result = call("train", config, "--json", code=1)
    assert "step 1" in json.loads(result.stdout)["error"]
    assert "Traceback" not in result.stderr
