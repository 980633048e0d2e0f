"""Settings that only the data or the tokenizer make pointless: refused before a run, left alone when it goes on."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

import longtune
from longtune.cli import app
from longtune.config import load_config
from longtune.data.template import Template
from longtune.errors import UserError
from longtune.train import train
from longtune.train.folder import RunFolder
from longtune.train.unread import idle_validation, unread_settings
from tests.tiny_run import TEMPLATE, read_events, write_config, write_model, write_pairs, write_rows

SWITCH = (
    "{% if flag %}!{% endif %}{% generation %}{{ bos_token }}{% endgeneration %}{% set own = 1 %}{{ own }}"
    "{% if day is not defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day or raise_exception('no day') }}"
    "{% for key, value in other.items() %}{{ key }}{{ value }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def config(model, data, tmp_path):
    return write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", steps=1, accumulate=1)


class Tokenizer:
    def __init__(self, template):
        self.chat_template = template
        self.special_tokens_map = {"bos_token": "<s>"}

    def get_chat_template(self, name, tools):
        return self.chat_template


@pytest.mark.parametrize(
    ("template", "given", "said"),
    [
        (TEMPLATE + SWITCH, "flag", None),
        (TEMPLATE + SWITCH, "bos_token", None),
        (TEMPLATE + SWITCH, "tokenize", "doesn't read it; its names are day, flag, other"),
        (TEMPLATE + SWITCH, "Flag", "its names are"),
        (TEMPLATE + SWITCH, "day", None),
        (TEMPLATE + SWITCH, "own", None),
        (TEMPLATE, "flag", "doesn't read it; it reads nothing but the row"),
        (TEMPLATE, "message", "doesn't read it"),
        (TEMPLATE, "loop", "doesn't read it"),
        (TEMPLATE, "messages", "comes from the row"),
        (TEMPLATE, "add_generation_prompt", "comes from the row"),
        (None, "flag", "no chat template"),
    ],
)
def test_arguments_that_no_template_reads_are_refused_by_name(template, given, said):
    config = load_config(None, ["data=a", f"chat_template_kwargs={{{given}: 1}}"])
    problems = unread_settings(config, None, Tokenizer(template))
    assert bool(problems) == (said is not None)
    for problem in problems:
        assert problem.place == f"chat_template_kwargs.{given}"
        assert said in problem.reason
        assert "raise_exception" not in problem.reason


def test_a_template_that_is_no_jinja_is_refused():
    with pytest.raises(UserError, match="chat template"):
        _ = Template(Tokenizer("{% if %}")).variables


def test_a_number_of_rows_to_validate_needs_rows():
    config = load_config(None, ["data=a", "train.eval_rows=3"])
    assert [problem.place for problem in unread_settings(config, None, Tokenizer(None))] == ["train.eval_rows"]
    assert not unread_settings(config, "valid.jsonl", Tokenizer(None))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.eval_every=7"], True),
        (["train.eval_every=0"], False),
        (["train.eval_every=50"], False),
        (["train.eval_every=7", "samples={prompts: [a]}"], False),
    ],
)
def test_a_rhythm_without_anything_to_validate_is_told(overrides, told):
    config = load_config(None, ["data=a", *overrides])
    assert bool(list(idle_validation(config, None))) == told
    assert not list(idle_validation(config, "valid.jsonl"))
    assert not unread_settings(config, None, Tokenizer(None))


def test_prompts_can_be_shared_only_by_several_answers(config, tmp_path):
    with pytest.raises(UserError, match="prompt_sharing: no row here"):
        train(load_config(config, ["prompt_sharing=off"]))
    assert not (tmp_path / "run").exists()
    pairs = write_pairs(tmp_path / "pairs")
    for overrides in (["method=dpo"], ["method=orpo"]):
        where = [f"output={tmp_path / overrides[0]}", f"data={pairs}"]
        assert train(load_config(config, [*overrides, *where, "prompt_sharing=off"])).step == 1


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_every_command_that_reads_data_refuses_them(config, command, tmp_path):
    result = CliRunner().invoke(app, [command, str(config), "--set", "chat_template_kwargs={foo: 1}"])
    assert result.exit_code == 2
    assert "chat_template_kwargs.foo: the model's chat template doesn't read it" in result.output
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_started_with_them_goes_on(config, tmp_path):
    train(load_config(config, ["train.steps=2", "train.save_every=1", "train.stop_after=1e-6"]))
    file = tmp_path / "run" / "config.yaml"
    values = yaml.safe_load(file.read_text())
    values |= {"chat_template_kwargs": {"foo": 1}, "simpo": {"beta": 9.0, "gamma": 1.0}}
    values["train"]["stop_after"] = None
    file.write_text(yaml.safe_dump(values))
    for named in (tmp_path / "run", file):
        assert load_config(named).simpo.beta == 2.0
    # Nor does the user's own file need them any more.
    clean = load_config(config, ["train.steps=2", "chat_template_kwargs={foo: 1}"])
    assert not any("simpo" in line for line in RunFolder(tmp_path / "run").check_resumable(clean))
    assert longtune.train(tmp_path / "run", resume=True).metrics["status"] == "done"
    resumed = [event for event in read_events(tmp_path / "run") if event["event"] == "resumed"]
    assert not any("simpo" in line for event in resumed for line in event["changed"])


def test_python_may_name_the_file_or_give_its_keys(config, tmp_path):
    values = yaml.safe_load(config.read_text())
    assert longtune.plan(config, tokens=64).fits
    assert longtune.plan(values, tokens=64).tokens == 64
    assert longtune.train(values).step == 1
    with pytest.raises(UserError, match="already holds a run"):
        longtune.train(str(config))
    for call in (longtune.train, longtune.plan):
        with pytest.raises(UserError, match="no such file"):
            call("nowhere.yaml")
        with pytest.raises(UserError, match="is no config"):
            call(3)
        with pytest.raises(UserError, match="unknown key"):
            call({**values, "modle": "x"})


def test_a_list_of_names_is_trained_on_and_named_plainly(config, data, tmp_path):
    rows = data / "train.jsonl"
    result = CliRunner().invoke(
        app, ["train", str(config), "--set", f"data=[{rows}, {data / 'valid.jsonl'}]", "--set", "train.eval_every=0"]
    )
    assert result.exit_code == 0, result.output
    assert f"and {rows}, {data / 'valid.jsonl'}, then planning" in result.output
    assert "DataSource" not in result.output
    assert next(event for event in read_events(tmp_path / "run") if event["event"] == "meta")["rows"] == 17
