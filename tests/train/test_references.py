"""Reference log-probs: the cache's keys and damage, what is computed, and the first step of a DPO run."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from longtune.config import load_config
from longtune.data import Batcher, load_dataset
from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora, save_adapter
from longtune.model.loading import load_model
from longtune.model.reference import load_reference
from longtune.train import train
from longtune.train.references import Reference, Referenced
from tests.tiny_run import losses, read_events, write_config, write_model, write_pairs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path):
    return write_pairs(tmp_path / "data")


@pytest.fixture
def parts(model, data):
    """A data set and a tuned model under an engine."""
    loaded = load_model(str(model), dtype="float32", device="cpu")
    dataset = load_dataset(str(data / "train.jsonl"), loaded.tokenizer, method="dpo")
    tuned = add_lora(loaded.model, rank=4, alpha=8, dropout=0.2)
    engine = Engine(tuned, Plan(chunk_tokens=64))
    yield dataset, tuned, engine
    engine.close()


def filled(parts, rows=None, dataset=None, reference=None):
    """(what was told, the data set with its references)."""
    given, tuned, engine = parts
    told: list[dict] = []
    data = Referenced(dataset or given)
    wanted = range(len(data.trees)) if rows is None else rows
    data.fill(reference or Reference(engine, tuned), wanted, told.append)
    return told, data


def values(data):
    return [tree.reference for tree in data.trees]


def test_values_are_computed_once_and_come_back_exactly(parts, cache):
    told, data = filled(parts)
    assert told[-1]["computed"] == told[-1]["done"] == told[-1]["rows"] == len(parts[0])
    again, back = filled(parts)
    assert again[-1]["computed"] == 0
    assert values(back) == values(data)
    assert all(len(sums) == 2 and max(sums) < 0 for sums in values(data))
    assert len(list(cache.rglob("*.safetensors"))) == len(list((cache / "references").iterdir())) == 1


def test_only_the_rows_that_are_needed_are_computed_and_later_ones_join_them(parts):
    told, data = filled(parts, rows=[1, 3])
    assert told[-1]["computed"] == 2
    assert [sums is not None for sums in values(data)] == [i in (1, 3) for i in range(len(parts[0]))]
    told, more = filled(parts)
    assert told[-1]["computed"] == len(parts[0]) - 2
    assert values(more)[1] == values(data)[1]
    assert filled(parts, rows=[0, 3])[0][-1]["computed"] == 0


def test_the_batcher_gets_trees_with_their_references_and_sources_keep_their_weights(parts, data, model):
    tokenizer = load_model(str(model), device="cpu").tokenizer
    sources = [{"path": str(data / "train.jsonl"), "weight": 1}, {"path": str(data / "valid.jsonl"), "weight": 2}]
    dataset = load_dataset(sources, tokenizer, method="dpo")
    _, referenced = filled(parts, dataset=dataset)
    plain, batcher = Batcher(dataset, batch_size=3), Batcher(referenced, batch_size=3)
    assert batcher.plan(0) == plain.plan(0) and len(batcher.plan(0)) > len(dataset) / 3
    for ours, theirs in zip(batcher.next(), plain.next(), strict=True):
        assert ours.row == theirs.row and ours.reference is not None and theirs.reference is None
    assert referenced.trees.sizes == dataset.trees.sizes


def test_dropout_does_not_touch_the_reference(parts):
    dataset, tuned, engine = parts
    tuned.train()
    reference = Reference(engine, tuned)
    first = reference.sums(dataset.trees[:4])
    assert first == reference.sums(dataset.trees[:4])
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert first == reference.sums(dataset.trees[:4])


@pytest.mark.parametrize("damage", ["torn", "changed", "other key", "empty"])
def test_a_damaged_cache_is_said_and_computed_again(parts, cache, damage):
    _, data = filled(parts)
    (file,) = (cache / "references").iterdir()
    content = file.read_bytes()
    if damage == "other key":
        content = content.replace(b"torch.float32", b"torch.float64", 1)
    damaged = {"torn": content[:-9], "changed": content[:-1] + bytes([content[-1] ^ 1]), "empty": b""}
    file.write_bytes(damaged.get(damage, content))
    told, again = filled(parts)
    assert "problem" in told[0] and told[0]["path"] == str(file)
    assert told[-1]["computed"] == len(parts[0])
    assert values(again) == values(data)
    assert filled(parts)[0][-1]["computed"] == 0


def test_another_base_adapter_or_data_set_has_a_cache_of_its_own(parts, cache, data, model, tmp_path):
    dataset, tuned, engine = parts
    _, plain = filled(parts)
    other = load_dataset(str(data / "valid.jsonl"), load_model(str(model), device="cpu").tokenizer, method="dpo")
    assert filled(parts, dataset=other)[0][-1]["computed"] == len(other)
    frozen = add_lora(load_model(str(model), dtype="float32", device="cpu").model, rank=2, alpha=4)
    with torch.no_grad():
        for name, parameter in frozen.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    save_adapter(frozen, tmp_path / "frozen")
    load_reference(tuned, tmp_path / "frozen")
    told, under = filled(parts, reference=Reference(engine, tuned, str(tmp_path / "frozen")))
    assert told[-1]["computed"] == len(dataset)
    assert values(under) != values(plain)
    with torch.no_grad():
        tuned.get_base_model().lm_head.weight.mul_(1.1)
    assert filled(parts)[0][-1]["computed"] == len(dataset)
    assert len(list((cache / "references").iterdir())) == 4


def test_a_stop_keeps_what_was_computed_and_the_run_can_be_resumed(model, data, tmp_path, monkeypatch):
    """References of long data take long: a signal must not wait for the last of them."""
    config = load_config(
        write_config(tmp_path / "run.yaml", model, data, tmp_path / "run"), ["method=dpo", "memory.chunk_tokens=8"]
    )
    cancel = threading.Event()
    plain = Reference.sums

    def slow(self, trees):
        cancel.set()
        return plain(self, trees)

    with monkeypatch.context() as patch:
        patch.setattr(Reference, "sums", slow)
        stopped = train(config, cancel=cancel)
    assert (stopped.reason, stopped.step) == ("cancelled", 0)
    (told,) = [e for e in read_events(tmp_path / "run") if e["event"] == "reference" and e["split"] == "train"]
    assert told["computed"] == told["done"] == 1 < told["rows"]
    train(config, resume=True)
    told = next(e for e in read_events(tmp_path / "run") if e["event"] == "reference" and e["done"] == e["rows"])
    assert told["computed"] == told["rows"] - 1
    assert len(losses(tmp_path / "run")) == 6


@pytest.mark.parametrize("reference", ["cached", "online"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_step_of_a_fresh_run_has_the_loss_of_a_coin_toss(model, data, tmp_path, reference, frozen):
    """Dropout, rsLoRA and all: the policy is the reference until the first update."""
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", steps=2)
    settings = ["method=dpo", f"dpo.reference={reference}", "lora.rslora=true", "train.learning_rate=0.1"]
    if frozen:
        # A warm start from an adapter, which is the reference as well.
        start = write_config(tmp_path / "start.yaml", model, data, tmp_path / "start", steps=2)
        train(load_config(start, ["method=orpo", "lora.rslora=true"]))
        settings += [f"init_adapter={tmp_path / 'start'}", f"dpo.reference_adapter={tmp_path / 'start'}"]
        settings += ["lora.dropout=0"]
    train(load_config(config, settings))
    found = losses(tmp_path / "run")
    assert found[1] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(found[2] - math.log(2)) > 1e-3


def test_cached_and_online_references_train_the_same(model, data, tmp_path):
    for reference in ("cached", "online"):
        config = write_config(tmp_path / f"{reference}.yaml", model, data, tmp_path / reference)
        train(load_config(config, ["method=dpo", f"dpo.reference={reference}"]))
    cached, online = losses(tmp_path / "cached"), losses(tmp_path / "online")
    assert cached == pytest.approx(online, rel=1e-5)
    last = [
        [e for e in read_events(tmp_path / name) if e["event"] == "validation"][-1] for name in ("cached", "online")
    ]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-5)
    assert last[0]["margin"] == pytest.approx(last[1]["margin"], abs=1e-4)
    kinds = {name: {event["event"] for event in read_events(tmp_path / name)} for name in ("cached", "online")}
    assert "reference" in kinds["cached"] and "reference" not in kinds["online"]
