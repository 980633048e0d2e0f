"""Errors of a config in the words of its YAML, and forms that a person would expect to be taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtune.config import RunConfig, check_config, describe_keys, load_config
from longtune.errors import UserError

JARGON = (
    "dictionary",
    "instance",
    "tuple",
    "valid ",
    "string",
    "integer",
    "None",
    "True",
    "Config",
    "Source(",
    "pydantic",
)


def refusal(override: str):
    with pytest.raises(UserError) as caught:
        load_config(None, ["data=a", override] if not override.startswith("data=") else [override])
    return caught.value.problems


WRONG = ("[[1]]", "{no_such_key: 1}", "3.5", "-1", "true", "null", '"#"', "[]", "[null]")


KEYS = [key for key in describe_keys() if key not in ("data", "data.path")]


@pytest.mark.parametrize("key", KEYS)
def test_wrong_values_are_told_once_without_jargon(key):
    for value in WRONG:
        override, place = f"{key}={value}", f"--set {key}"
        if key == "data.weight":
            override, place = f"data=[{{path: a, weight: {value}}}]", "--set data.0.weight"
        try:
            load_config(None, [override] if key.startswith("data") else ["data=a", override])
        except UserError as error:
            (problem,) = error.problems
            assert problem.place.startswith(place)
            assert not [word for word in JARGON if word in problem.reason], problem.reason


@pytest.mark.parametrize(
    ("override", "said", "fix"),
    [
        ("compile=sometimes", "must be 'auto', true or false, not 'sometimes'", "torch.compile"),
        ("memory=24", "24 is not one of the forms", "write 24GB"),
        ("lora.layers=3", "must be a text or a list, not 3", "write last 3 or [3]"),
        ("train.keep=3", "must be a text, not 3", "write last 3"),
        ("train.steps=1e3", "must be a whole number", "write 1000"),
        ("train.betas=[0.9]", "must be a list of 2, not [0.9]", "two averages"),
        ("train.betas=[0.9, 0.9, 0.9]", "at most 2", "two averages"),
        ("lora=5", "is a section with keys of its own, not 5", "lora.rank"),
        ("train=null", "is a section with keys of its own, not null", "train.steps"),
        ("log=5", "must be a list, not 5", "memory"),
        ("log=everything", "must be 'memory'", ""),
        ("columns=question", "must be keys with values", "{theirs: ours}"),
        ("lora.rank=many", "must be a whole number, not 'many'", "Rank"),
        ("lora.rank=0", "must be at least 1, not 0", ""),
        ("lora.dropout=1", "must be below 1, not 1", ""),
        ("data=5", "5 is not one of the forms it may have", "a hub name"),
        ("data=[5]", "a source is a file, a folder, a hub name, or {path, weight}", ""),
        ("data=[{weight: 2}]", "is missing", "hub name"),
        ("data=''", "a text that is not empty", "a hub name"),
        ("model=''", "a text that is not empty", "a hub name"),
        ("data=['']", "a text that is not empty", "a hub name"),
        ("data=[{path: []}]", "must be a text, not []", "hub name"),
    ],
)
def test_a_wrong_type_says_what_to_write(override, said, fix):
    (problem,) = refusal(override)
    assert said in problem.reason
    assert fix in problem.fix
    assert not problem.fix.startswith(" ")


def test_long_values_are_not_repeated_whole():
    (problem,) = refusal(f"lora.rank={'x' * 500}")
    assert len(problem.reason) < 200


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ("rows.jsonl", ("rows.jsonl",)),
        ("[rows.jsonl, pairs.jsonl]", ("rows.jsonl", "pairs.jsonl")),
        ("[rows.jsonl, {path: pairs.jsonl, weight: 2}]", ("rows.jsonl", "pairs.jsonl")),
        ("{path: rows.jsonl, weight: 2}", ("rows.jsonl",)),
    ],
)
def test_data_is_a_name_or_a_list_of_them(given, paths):
    config = load_config(None, [f"data={given}"])
    assert config.sources == paths
    assert config.output == "runs/rows"
    assert load_config(None, [f"data={config.to_dict()['data']!r}"]) == config


@pytest.mark.parametrize("key", ["log", "track"])
def test_one_name_counts_as_a_list_of_it(key):
    name = {"log": "memory", "track": "wandb"}[key]
    assert getattr(load_config(None, ["data=a", f"{key}={name}"]), key) == (name,)


def test_python_may_give_paths_keys_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {
        "data": [Path("rows.jsonl"), {"path": Path("more.jsonl")}],
        "valid": Path("valid.jsonl"),
        "output": Path("run"),
        "samples": {"prompts": Path("prompts.txt")},
    }
    config = check_config(values)
    assert config.sources == ("rows.jsonl", "more.jsonl")
    assert (config.valid, config.output, config.samples.prompts) == ("valid.jsonl", "run", "prompts.txt")
    assert config == check_config(RunConfig.model_validate(values))
    Path("run.yaml").write_text(config.to_yaml())
    for name in ("run.yaml", Path("run.yaml")):
        assert check_config(name) == config
    assert isinstance(values["data"][0], Path)


@pytest.mark.parametrize("given", [None, 3, ["run.yaml"]])
def test_what_is_no_config_is_refused(given):
    with pytest.raises(UserError, match="is no config"):
        check_config(given)
    with pytest.raises(UserError, match="is missing"):
        check_config({})
    with pytest.raises(UserError, match="no such file"):
        check_config("nowhere.yaml")
