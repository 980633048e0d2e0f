"""Bad input: exit code 2, the place and the fix on stderr, no traceback, and nothing written."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from longtune.cli import app
from longtune.config import load_config
from longtune.errors import UserError
from longtune.train.folder import RunFolder
from tests.tiny_run import write_config, write_model, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def config(model, tmp_path):
    return write_config(tmp_path / "run.yaml", model, write_rows(tmp_path / "data"), tmp_path / "runs" / "run")


@pytest.fixture
def refused(config, tmp_path):
    """Calls the command, checks that it refuses, and returns what it says."""

    def call(*extra, verb="train"):
        result = CliRunner().invoke(app, [verb, str(config), *extra])
        assert result.exit_code == 2, result.output
        assert isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.output
        assert not (tmp_path / "runs").exists(), "nothing may be written"
        return result.stderr

    return call


def test_missing_config(refused, config):
    config.unlink()
    assert f"{config}: no such file" in refused()


def test_missing_data(refused, tmp_path):
    shutil.rmtree(tmp_path / "data")
    assert f"{tmp_path}/data" in refused()


def test_empty_data(refused, tmp_path):
    (tmp_path / "data" / "train.jsonl").write_text("")
    assert "train.jsonl" in refused() or "no row" in refused()


def test_malformed_line_is_numbered(refused, tmp_path):
    file = tmp_path / "data" / "train.jsonl"
    lines = file.read_text().splitlines()
    lines[6] = lines[6][:-4]
    file.write_text("\n".join(lines))
    assert f"{file}:7" in refused()


def test_malformed_validation_data(refused, tmp_path):
    file = tmp_path / "data" / "valid.jsonl"
    file.write_text("{\n")
    assert f"{file}:1" in refused()


@pytest.mark.parametrize("name", ["train", "valid"])
@pytest.mark.parametrize("verb", ["train", "check"])
def test_data_of_which_nothing_is_left_is_named(config, tmp_path, verb, name):
    file = tmp_path / "data" / f"{name}.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": ""}) + "\n")
    result = CliRunner().invoke(app, [verb, str(config), "--set", "bad_rows=drop"])
    assert result.exit_code == 2
    assert f"{file}: no row of it is left (1 empty answer)" in result.output


def test_what_holds_for_training_and_validation_rows_is_said_once(refused):
    said = refused("--set", "method=dpo", "--set", "train_on=last")
    assert said.count("train_on") == 1


def test_unknown_key_shows_the_nearest(refused):
    said = refused("--set", "lora.rnak=3", "--set", "train.lerning_rate=1")
    assert "lora.rank" in said
    assert "train.learning_rate" in said


def test_row_without_trained_token(refused, tmp_path):
    file = tmp_path / "data" / "train.jsonl"
    row = {"messages": [{"role": "user", "content": "a question and no answer"}]}
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    assert f"{file}:13" in refused()


def test_over_long_row(refused):
    said = refused("--set", "train.max_tokens=8")
    assert "max_tokens" in said
    assert "overlong" in said


def test_targets_that_match_nothing_show_the_nearest(refused):
    said = refused("--set", "lora.targets=[q_porj]")
    assert "q_porj" in said
    assert "q_proj" in said


def test_model_folder_without_weights(refused, model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert "weights" in refused("--set", f"model={bare}")


def test_missing_model(refused):
    assert "./nowhere" in refused("--set", "model=./nowhere")


def test_data_and_adapter_are_complained_of_together(refused, tmp_path):
    (tmp_path / "data" / "train.jsonl").write_text("{\n")
    said = refused("--set", "lora.targets=[q_porj]")
    assert "train.jsonl:1" in said
    assert "q_porj" in said


def test_plan_that_is_none(refused):
    assert "'device', 'host'" in refused("--set", "memory.boundary_store=tape")


def test_resume_without_a_run(refused):
    assert "no run to resume" in refused("--resume")


def test_init_adapter_of_another_shape(refused, model, tmp_path):
    from longtune.model.adapters import add_lora, save_adapter
    from longtune.model.loading import load_model

    save_adapter(add_lora(load_model(str(model), device="cpu").model, rank=2, alpha=4), tmp_path / "other")
    assert "init_adapter" in refused("--set", f"init_adapter={tmp_path / 'other'}")


def test_nothing_named():
    result = CliRunner().invoke(app, ["train"])
    assert result.exit_code == 2
    assert "--data" in result.stderr


def test_problems_come_as_json_too(config):
    result = CliRunner().invoke(app, ["train", str(config), "--set", "lora.rnak=3", "--json"])
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["exit_code"] == 2
    assert found["problems"][0]["place"] == "--set lora.rnak"


class TestAFolderThatHoldsARun:
    @pytest.fixture
    def run(self, model, tmp_path):
        config = write_config(tmp_path / "run.yaml", model, write_rows(tmp_path / "data"), tmp_path / "run", steps=1)
        assert CliRunner().invoke(app, ["train", str(config)]).exit_code == 0
        return config

    def call(self, *arguments):
        before = sorted((p, p.stat().st_mtime_ns) for p in arguments[0].parent.rglob("*"))
        result = CliRunner().invoke(app, ["train", *map(str, arguments)])
        assert result.exit_code == 2, result.output
        assert sorted((p, p.stat().st_mtime_ns) for p in arguments[0].parent.rglob("*")) == before
        return result.stderr

    def test_is_refused_and_resume_is_offered(self, run):
        said = self.call(run)
        assert "already holds a run" in said
        assert "--resume" in said

    def test_is_not_resumed_when_it_is_done(self, run):
        assert "done" in self.call(run, "--resume")


class TestAResumeOfAnotherRun:
    @pytest.fixture
    def stopped(self, config):
        assert CliRunner().invoke(app, ["train", str(config), "--set", "train.stop_after=1e-6"]).exit_code == 0
        return config

    def call(self, *arguments):
        result = CliRunner().invoke(app, ["train", *map(str, arguments), "--resume"])
        assert result.exit_code == 2, result.output
        return result.stderr

    def test_says_which_keys_differ(self, stopped):
        said = self.call(stopped, "--set", "lora.rank=8", "--set", "train.seed=1")
        assert "lora.rank" in said
        assert "train.seed" in said

    def test_notices_other_data(self, stopped, tmp_path):
        write_rows(tmp_path / "data", seed=1)
        assert "train data" in self.call(stopped)


def test_an_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "afile").write_text("x")
    folder = RunFolder(tmp_path / "afile" / "x")
    with pytest.raises(UserError, match="can't be made"):
        folder.check_new()
    with pytest.raises(UserError, match="can't be made"), folder.lock():
        pass


@pytest.mark.parametrize("change", ["train.seed=99999999999999999999999", "train.steps=true", "train.steps=2.0"])
def test_numbers_that_are_none_are_refused(change):
    with pytest.raises(UserError, match=r"train\.(seed|steps)"):
        load_config(None, ["data=rows.jsonl", change])
