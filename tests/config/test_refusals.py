"""Keys that nothing reads: refused where they were given, silent at their defaults and in the config of a run."""

from __future__ import annotations

import pytest
import yaml

from longtune.config import RunConfig, check_config, describe_keys, load_config
from longtune.config.refusals import MOST, RULES, unread
from longtune.errors import UserError

OTHERS = {
    "dpo.beta": 0.5,
    "dpo.loss": "ipo",
    "dpo.label_smoothing": 0.1,
    "dpo.reference": "online",
    "dpo.reference_adapter": "nowhere",
    "orpo.lambda": 7.0,
    "orpo.sft_scope": "response",
    "simpo.beta": 3.0,
    "simpo.gamma": 2.0,
}
"""A value that is not the default of every key of a method's own section."""

UNREAD = [
    *(
        ([f"method={method}", f"{key}={value}"], key)
        for key, value in OTHERS.items()
        for method in ("sft", "dpo", "orpo", "simpo")
        if not key.startswith(method)
    ),
    (["method=dpo", "dpo.loss=ipo", "dpo.label_smoothing=0.1"], "dpo.label_smoothing"),
    (["method=orpo", "train.loss_normalisation=sequence"], "train.loss_normalisation"),
    (["method=dpo", "train_on=last"], "train_on"),
    (["method=dpo", "answer_after=A"], "answer_after"),
    (["lora.sensitivity=kl.json"], "lora.sensitivity"),
    (["train.warmup_steps=3", "train.warmup_ratio=0.5"], "train.warmup_ratio"),
    (["train.eval_every=0", "train.eval_rows=3"], "train.eval_rows"),
    (["samples.max_new_tokens=9"], "samples.max_new_tokens"),
    (["samples.max_prompt_tokens=9"], "samples.max_prompt_tokens"),
    (["samples={prompts: [a], max_prompt_tokens: 9}"], "samples.max_prompt_tokens"),
    (["memory={keep: nothing, keep_layers: 2}"], "memory.keep_layers"),
    (["memory={keep: nothing, keep_below: kv}"], "memory.keep_below"),
    (["memory={keep: kv, keep_below: attention}"], "memory.keep_below"),
]


def refused(*overrides, path=None):
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize(("overrides", "key"), UNREAD, ids=[" ".join(overrides) for overrides, _ in UNREAD])
def test_a_key_that_nothing_reads_is_refused_where_it_was_given(overrides, key):
    (problem,) = refused("data=a", *overrides)
    assert problem.place == f"--set {key}"
    assert problem.reason
    assert problem.fix.startswith("leave it out")


def test_every_key_of_a_method_is_tried_above():
    assert set(OTHERS) == {key for key in describe_keys() if key.startswith(("dpo.", "orpo.", "simpo."))}


def test_rules_name_keys_of_the_schema():
    for rule in RULES:
        assert {*rule.keys, *rule.by} <= set(describe_keys())


@pytest.mark.parametrize("method", ["sft", "dpo", "orpo", "simpo"])
def test_defaults_are_silent_also_where_they_are_written_out(method, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(load_config(None, ["data=a", f"method={method}"]).to_yaml())
    assert load_config(file).to_yaml() == file.read_text()
    keys = ("keep_layers", "keep_below", "halves")
    written = [f"memory={{{key}: {value}}}" for key, value in zip(keys, ("null", "nothing", "false"), strict=True)]
    for override in written:
        load_config(file, [override])


@pytest.mark.parametrize(
    "memory",
    [
        "{keep_layers: 2}",
        "{keep_below: kv}",
        "{keep: everything, keep_below: kv}",
        "{keep: attention, keep_below: kv}",
        "{keep: nothing, keep_layers: 2, keep_below: kv}",
        "{keep: kv, keep_layers: 2, keep_below: attention}",
    ],
)
def test_keys_of_the_plan_that_the_planner_may_still_use_are_taken(memory):
    load_config(None, ["data=a", f"memory={memory}"])


def test_a_config_made_in_python_is_refused_alike():
    for given in (RunConfig.model_validate({"data": "a", "dpo": {"beta": 0.5}}), {"data": "a", "dpo": {"beta": 0.5}}):
        with pytest.raises(UserError) as caught:
            check_config(given)
        assert [problem.place for problem in caught.value.problems] == ["config: dpo.beta"]


@pytest.fixture
def preferences(tmp_path):
    file = tmp_path / "run.yaml"
    values = {"data": "a", "method": "dpo", "dpo": {"beta": 0.5}, "train": {"eval_rows": 3, "warmup_ratio": 0.5}}
    file.write_text(yaml.safe_dump(values))
    return file


def test_what_an_override_makes_pointless_gives_way(preferences):
    config = load_config(preferences, ["method=sft", "train.eval_every=0", "train.warmup_steps=0"])
    assert not list(unread(config))
    assert config.dpo.beta == 0.1
    assert load_config(preferences).dpo.beta == 0.5


def test_what_the_file_itself_makes_pointless_does_not(preferences):
    values = yaml.safe_load(preferences.read_text())
    preferences.write_text(yaml.safe_dump(values | {"method": "orpo"}))
    (problem,) = refused("train.eval_every=0", path=preferences)
    assert problem.place == f"{preferences}: dpo.beta"


@pytest.mark.parametrize("named", ["", "config.yaml"])
def test_the_config_of_a_run_that_was_started_still_loads(tmp_path, named):
    values = {"data": "a", "output": str(tmp_path), "dpo": {"beta": 0.5}, "train": {"epochs": 20000.0}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "metrics.jsonl").write_text("")
    config = load_config(tmp_path / named)
    assert (config.dpo.beta, config.train.epochs) == (0.1, 20000.0)
    (problem,) = refused("orpo.lambda=7", path=tmp_path / named)
    assert problem.place == "--set orpo.lambda"


@pytest.mark.parametrize("key", MOST)
def test_numbers_have_an_end(key):
    most, fix = MOST[key]
    for value, taken in ((most, True), (most + 1, False), (10**300, False)):
        size = str(value) if key == "train.accumulate" else f"{value:.1f}"
        overrides, place = ["data=a", f"{key}={size}"], f"--set {key}"
        if key == "data.weight":
            overrides, place = [f"data=[a, {{path: b, weight: {size}}}]"], "--set data.1.weight"
        if taken:
            load_config(None, overrides)
        elif value < 2**63 or key != "train.accumulate":
            (problem,) = refused(*overrides)
            assert (problem.place, problem.fix) == (place, fix)
            assert f"at most {most:,}" in problem.reason
