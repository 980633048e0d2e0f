"""Reading a config: every problem at once with its place, defaults written out, and a dump that reads back."""

from __future__ import annotations

import pytest

from longtune.config import LEARNING_RATES, load_config
from longtune.errors import UserError

DESIGNED = """
model: smollm2
data: data/
method: sft
output: runs/contracts
lora: {rank: 16, alpha: 32, targets: all-linear, rank_policy: constant, dropout: 0.0, rslora: false,
       lora_plus_ratio: 1.0}
train: {steps: 200, learning_rate: 2.0e-4, schedule: cosine, warmup_ratio: 0.03, batch_size: 1, accumulate: 8,
        max_tokens: 131072, overlong: error, seed: 0, clip_norm: 1.0, eval_every: 50, save_every: 50}
memory: {chunk_tokens: 8192, layers_per_segment: 1, boundary_store: host, head_chunk: 1024, keep: attention}
dtype: auto
device: auto
dpo: {beta: 0.1, loss: sigmoid, reference: cached}
orpo: {lambda: 0.1, sft_scope: full}
init_adapter: null
prompt_sharing: tree
"""


@pytest.fixture
def designed(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(DESIGNED)
    return file


def problems(path, *overrides):
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return {problem.place.replace(f"{path}: ", ""): problem for problem in caught.value.problems}


def test_the_documented_file_loads_and_its_dump_reads_back_to_the_same_config(designed, tmp_path):
    config = load_config(designed)
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert again.read_text() == load_config(again).to_yaml()


def test_defaults_that_follow_from_other_keys_are_written_out():
    config = load_config(None, ["data=rows/tickets.jsonl.gz"])
    assert config.train.learning_rate == LEARNING_RATES["sft"]
    assert config.train.epochs == 1.0
    assert config.output == "runs/tickets"


def test_all_problems_come_at_once_each_with_its_place(designed):
    found = problems(
        designed, "lora.rnak=4", "train.schedule=cosin", "lora.rank=0", "memory.chunk_tokns=8", "dtype=int8"
    )
    assert set(found) == {
        "--set lora.rnak",
        "--set train.schedule",
        "--set lora.rank",
        "--set memory.chunk_tokns",
        "--set dtype",
    }
    assert "lora.rank" in found["--set lora.rnak"].fix
    assert "memory.chunk_tokens" in found["--set memory.chunk_tokns"].fix


def test_an_unknown_key_of_the_file_is_placed_there_and_a_misplaced_one_finds_its_section(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: rows.jsonl\nlearning_rate: 1e-4\ntrain: {stesp: 3}\n")
    found = problems(file)
    assert "train.learning_rate" in found["learning_rate"].fix
    assert "train.steps" in found["train.stesp"].fix


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("lora.sensitivity=kl.json", "--set lora.sensitivity"),
        ("train.warmup_steps=200", "--set train.warmup_steps"),
        ("train={steps: 9, keep: best, eval_every: 0}", "--set train.keep"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_reason_and_a_fix(designed, override, place):
    found = problems(designed, override)
    assert found[place].reason
    assert found[place].fix


def test_a_method_without_an_objective_is_refused(designed, monkeypatch):
    monkeypatch.setattr("longtune.objective.OBJECTIVES", {"sft": object})
    assert "not supported" in problems(designed, "method=orpo")["--set method"].reason


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "run.yaml"),
        ("- a list", "run.yaml"),
        ("data: [", "run.yaml:1"),
        ("data: a\ntrain: {steps: 1}\ntrain: {steps: 2}\n", "run.yaml:3"),
        ("model: smollm2", "run.yaml: data"),
    ],
)
def test_a_file_that_says_nothing_or_too_much_is_named_with_its_line(tmp_path, text, place):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(file)
    assert [problem.place for problem in caught.value.problems] == [f"{tmp_path}/{place}"]


def test_a_missing_file_is_named(tmp_path):
    assert "no such file" in str(problems(tmp_path / "none.yaml"))


@pytest.mark.parametrize(("text", "seconds"), [("3h", 10800), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("7", 7)])
def test_durations(text, seconds):
    assert load_config(None, ["data=a", f"train.stop_after={text}"]).train.stop_after == seconds


def test_numbers_in_the_form_that_yaml_reads_as_text():
    assert load_config(None, ["data=a", "train.learning_rate=2e-5"]).train.learning_rate == 2e-5


def test_a_run_folder_is_its_config_with_the_folder_itself_as_output(designed):
    assert load_config(designed.parent).output == str(designed.parent)


def test_local_names_become_absolute_where_they_exist(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["data=[{path: rows.jsonl}]", "valid=owner/name"]).anchored()
    assert config.data[0].path == str(tmp_path / "rows.jsonl")
    assert config.valid == "owner/name"
    assert config.model == "smollm2"


def test_a_bare_off_is_no_boolean(designed):
    config = load_config(designed, ["prompt_sharing=off"])
    assert config.prompt_sharing == "off"
    designed.write_text(config.to_yaml())
    assert load_config(designed) == config


def test_one_tracker_counts_as_a_list_of_it_and_each_is_named_once():
    assert load_config(None, ["data=a", "track=tensorboard"]).track == ("tensorboard",)
    assert load_config(None, ["data=a", "track=[wandb, mlflow]"]).track == ("wandb", "mlflow")
    for value, said in (("[wandb, wandb]", "named twice"), ("comet", "must be 'tensorboard', 'trackio'")):
        with pytest.raises(UserError, match=said):
            load_config(None, ["data=a", f"track={value}"])


@pytest.mark.parametrize("value", ["-1", "true", "[]", "1.5"])
def test_prompts_are_a_number_a_list_or_a_file(value):
    with pytest.raises(UserError, match=r"samples\.prompts"):
        load_config(None, ["data=a", f"samples.prompts={value}"])


def test_a_file_of_prompts_is_found_again_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["data=a", "samples.prompts=prompts.txt"]).anchored()
    assert config.samples.prompts == str(tmp_path / "prompts.txt")


def test_an_override_of_one_way_to_say_it_takes_the_place_of_the_other(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: smollm2\ndata: rows.jsonl\ntrain: {steps: null, epochs: 3.0, batch_size: 4}\n")
    config = load_config(file, ["train.steps=100", "train.tokens_per_batch=512"])
    assert (config.train.steps, config.train.epochs) == (100, None)
    assert (config.train.tokens_per_batch, config.train.batch_size) == (512, 1)
    assert load_config(file, ["train.epochs=1"]).train.epochs == 1
    with pytest.raises(UserError, match="both given"):
        load_config(file, ["train.steps=100", "train.epochs=2"])
