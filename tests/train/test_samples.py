"""Sample answers: which prompts are asked, what the events hold, and that training does not notice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from longtune.config import load_config
from longtune.errors import UserError
from longtune.train import samples as samples_module
from longtune.train import train
from longtune.train.samples import split_row
from longtune.tree import Node, Targets, Tree
from tests.tiny_run import adapter_bytes, losses, read_events, write_config, write_model, write_pairs, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def make(model, data, tmp_path):
    def run(name, *overrides, rows=None, **changes):
        changes = {"steps": 4, "accumulate": 1, "save_every": 0, **changes}
        config = write_config(tmp_path / f"{name}.yaml", model, rows or data, tmp_path / name, **changes)
        return train(load_config(config, list(overrides)))

    return run


def sampled(run):
    return [event for event in read_events(run.folder) if event["event"] == "samples"]


def test_answers_come_before_the_first_step_with_each_validation_and_at_the_end(make):
    run = make("run", "samples.prompts=2", "samples.max_new_tokens=5", steps=5, eval_every=2)
    events = sampled(run)
    assert [event["step"] for event in events] == [0, 2, 4, 5]
    for event in events:
        assert len(event["items"]) == 2
        for item in event["items"]:
            assert item["prompt"].startswith("<|user|>") and item["prompt"].endswith("<|assistant|>")
            assert item["row"].rpartition("/")[2].startswith("valid.jsonl:")
            assert 0 < len(item["reference"]) <= 5
    prompts = [[item["prompt"] for item in event["items"]] for event in events]
    assert all(found == prompts[0] for found in prompts)
    reversed_words = " ".join(reversed(prompts[0][0].removeprefix("<|user|>").partition("<eos>")[0].split()))
    assert events[0]["items"][0]["reference"] == reversed_words[:5]


def test_training_and_its_generators_do_not_notice(make):
    torch.manual_seed(1)
    plain = make("plain")
    after = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1)
    asked = make("asked", "samples.prompts=3", "samples.max_new_tokens=4", "train.eval_every=1")
    assert adapter_bytes(asked.folder) == adapter_bytes(plain.folder)
    assert losses(asked.folder) == losses(plain.folder)
    assert torch.rand(1) == after[0]


def test_without_validation_there_are_answers_before_and_after(make):
    run = make("run", "samples.prompts=[abc, 'de f']", "samples.max_new_tokens=3", eval_every=0)
    events = sampled(run)
    assert [event["step"] for event in events] == [0, 4]
    assert [item["prompt"] for item in events[0]["items"]] == ["abc", "de f"]
    assert all("reference" not in item for item in events[0]["items"])


def test_own_prompts_go_through_the_template_as_the_rows_did(make, tmp_path, monkeypatch):
    asked = []
    whole = samples_module.generate
    monkeypatch.setattr(samples_module, "generate", lambda *a, **k: asked.append(a[2]) or whole(*a, **k))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n\ndef\n")
    make("chat", f"samples.prompts={prompts}", "samples.max_new_tokens=2", steps=1)
    assert asked[0] == [[{"role": "user", "content": "abc"}], [{"role": "user", "content": "def"}]]
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "abc def"}\n' * 4)
    make("text", "samples.prompts=[abc]", "samples.max_new_tokens=2", rows=text, steps=1)
    assert asked[-1] == ["abc"]
    strings = tmp_path / "strings.jsonl"
    strings.write_text('{"prompt": "abc", "completion": "cba"}\n' * 4)
    make("strings", "samples.prompts=[abc]", "samples.max_new_tokens=2", rows=strings, steps=1)
    assert asked[-1] == ["abc"]


def test_a_pair_asks_its_prompt_and_shows_the_chosen_answer(make, tmp_path):
    pairs = write_pairs(tmp_path / "pairs")
    run = make("run", "method=orpo", "samples.prompts=1", "samples.max_new_tokens=9", rows=pairs, steps=1)
    (item,) = sampled(run)[0]["items"]
    question = item["prompt"].removeprefix("<|user|>").partition("<eos>")[0]
    assert item["prompt"] == f"<|user|>{question}<eos><|assistant|>"
    assert item["reference"] == question[::-1]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["samples.prompts=2", "samples.max_prompt_tokens=3"], "raise samples.max_prompt_tokens"),
        (["samples.prompts=nowhere.txt"], "No such file"),
        (["samples.prompts=2", "data=TRAIN"], "no validation data"),
    ],
)
def test_prompts_that_are_not_there_are_refused_before_anything_is_written(make, data, tmp_path, overrides, said):
    with pytest.raises(UserError, match=said):
        make("run", *[item.replace("TRAIN", str(data / "train.jsonl")) for item in overrides])
    assert not (tmp_path / "run").exists()


def test_an_empty_file_of_prompts_is_refused(tmp_path):
    (tmp_path / "p.txt").write_text(" \n\n")
    with pytest.raises(UserError, match="holds no prompt"):
        samples_module.read_prompts(str(tmp_path / "p.txt"))


def test_a_run_out_of_memory_over_its_answers_goes_on_without_them(make, monkeypatch):
    plain = make("plain", steps=2)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(samples_module, "generate", full)
    run = make("run", "samples.prompts=2", steps=2)
    assert adapter_bytes(run.folder) == adapter_bytes(plain.folder)
    (warning,) = [event for event in read_events(run.folder) if event["event"] == "warning"]
    assert (warning["problem"], warning["step"]) == ("samples", 0)
    assert not sampled(run)


class TestSplit:
    def test_a_conversation_is_asked_up_to_its_first_answer(self):
        tree = Tree.sequence([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 0, 1])
        assert split_row(tree) == ([1, 2, 3], [4, 5])

    def test_a_text_is_asked_its_first_half(self):
        assert split_row(Tree.sequence(range(8))) == ([0, 1, 2, 3], [4, 5, 6, 7])
        prompt, answer = split_row(Tree.sequence(range(100)))
        assert (len(prompt), len(answer)) == (32, 68)
        assert split_row(Tree.sequence([5, 6])) == ([5], [6])

    def test_a_pair_is_asked_what_lies_before_the_chosen_answer(self):
        nodes = (Node(torch.tensor([1, 2])), Node(torch.tensor([9, 3, 4]), 0), Node(torch.tensor([5, 6]), 0))
        targets = Targets.of([0, 2, 3, 1, 5], [2, 3, 4, 5, 6], answer=[-1, 0, 0, 1, 1])
        assert split_row(Tree(nodes, targets)) == ([1, 2, 9], [3, 4])

    def test_a_row_without_an_answer_has_none(self):
        assert split_row(Tree((Node(torch.tensor([1, 2])),), Targets.of([0], [2], answer=[-1]))) is None
