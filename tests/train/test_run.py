"""Runs from Python: the numbers of a step, validation's reduction, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

import longtune.train as train_package
from longtune.config import load_config
from longtune.data import epoch_order, load_dataset
from longtune.engine import Engine
from longtune.model.adapters import add_lora, load_adapter
from longtune.model.loading import load_model
from longtune.objective import get
from longtune.train import RunFailed, train
from longtune.train.evaluate import choose_rows, validate
from longtune.tree import Tree
from tests.tiny_run import losses, read_events, tensors, write_config, write_model, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def config(model, tmp_path):
    return write_config(tmp_path / "run.yaml", model, write_rows(tmp_path / "data"), tmp_path / "run")


def token_losses(model, trees):
    """Plain autograd's oracle: -log p of every trained token, tree by tree."""
    found = []
    for tree in trees:
        logits = model(input_ids=tree.nodes[0].tokens[None]).logits[0].float()
        log_probs = torch.log_softmax(logits, -1)
        found.append(-log_probs[tree.targets.hidden, tree.targets.token])
    return found


def first_step(trees):
    """The longest of the epoch's order come first."""
    order = epoch_order(len(trees), 0, 0)
    return [trees[index] for index in sorted(order, key=lambda index: -trees[index].size)[:4]]


def test_the_first_loss_and_norm_are_those_of_plain_autograd_over_the_whole_step(config, model, tmp_path):
    train(load_config(config, ["train.steps=1", "lora.dropout=0", "train.clip_norm=0"]))
    loaded = load_model(str(model), dtype="float32", device="cpu")
    trees = list(load_dataset(str(tmp_path / "data"), loaded.tokenizer).trees)
    tuned = add_lora(loaded.model, rank=4, alpha=8)
    step = first_step(trees)
    loss = torch.cat(token_losses(tuned, step)).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in tuned.parameters() if p.grad is not None])
    event = next(event for event in read_events(tmp_path / "run") if event["event"] == "train")
    assert event["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert event["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_validation_is_the_token_mean_of_the_tuned_model(config, model, tmp_path):
    run = train(load_config(config))
    loaded = load_model(str(model), dtype="float32", device="cpu")
    trees = load_dataset(str(tmp_path / "data" / "valid.jsonl"), loaded.tokenizer).trees
    with torch.no_grad():
        truth = torch.cat(token_losses(load_adapter(loaded.model, tmp_path / "run"), trees)).mean()
    assert run.metrics["validation"]["loss"] == pytest.approx(float(truth), rel=1e-5)


def test_validation_rows_are_fixed_and_what_is_left_out_is_said(config, tmp_path):
    run = train(load_config(config, ["train.eval_rows=2"]))
    assert [(v["rows"], v["skipped"]) for v in run.metrics["trajectory"]] == [(2, 3), (2, 3)]


def test_the_rows_of_a_validation_are_spread_and_always_the_same():
    trees = [Tree.sequence([1, 2, number]) for number in range(50)]
    chosen, again = ([tree.nodes[0].tokens[2].item() for tree in choose_rows(trees, 5)] for _ in range(2))
    assert chosen == again == sorted(set(chosen))
    assert chosen[-1] > 10
    assert len(choose_rows(trees, None)) == len(choose_rows(trees, 60)) == 50


def test_validation_does_not_depend_on_how_rows_are_packed(model, tmp_path):
    loaded = load_model(str(model), dtype="float32", device="cpu")
    trees = load_dataset(str(write_rows(tmp_path / "data")), loaded.tokenizer).trees
    engine = Engine(loaded.model)
    found = [validate(engine, get("sft"), trees, batch_size=size) for size in (1, 5)]
    engine.close()
    assert found[0].metrics["loss"] == pytest.approx(found[1].metrics["loss"], rel=1e-6)
    assert found[0].trained_tokens == found[1].trained_tokens


def test_sequence_normalisation_is_the_mean_of_row_means(config, model, tmp_path):
    train(load_config(config, ["train.steps=1", "lora.dropout=0", "train.loss_normalisation=sequence"]))
    loaded = load_model(str(model), dtype="float32", device="cpu")
    trees = list(load_dataset(str(tmp_path / "data"), loaded.tokenizer).trees)
    step = first_step(trees)
    with torch.no_grad():
        truth = torch.stack([row.mean() for row in token_losses(loaded.model, step)]).mean()
    assert losses(tmp_path / "run")[1] == pytest.approx(float(truth), rel=1e-5)


@pytest.fixture
def broken_step(monkeypatch):
    """Makes one micro-batch's loss or gradient not finite."""

    def breaks(step, micro_batch, what):
        whole = Engine.accumulate

        def accumulate(self, forest, objective, totals, key=(0, 0)):
            sums = whole(self, forest, objective, totals, key)
            if key == (step, micro_batch):
                if what == "loss":
                    return {**sums, "loss": math.nan}
                next(p for p in self.model.parameters() if p.grad is not None).grad[0] = math.inf
            return sums

        monkeypatch.setattr(Engine, "accumulate", accumulate)

    return breaks


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_what_is_not_finite_stops_with_step_rows_and_last_good_checkpoint(config, tmp_path, broken_step, what):
    broken_step(4, 1, what)
    with pytest.raises(RunFailed) as caught:
        train(load_config(config))
    said = str(caught.value)
    assert "step 4" in said
    assert "train.jsonl:" in said
    assert "step-00002" in said
    events = read_events(tmp_path / "run")
    assert events[-1]["event"] == "failed"
    assert events[-1]["step"] == 4
    assert events[-1]["checkpoint"].endswith("step-00002")
    assert len(events[-1]["rows"]) == (2 if what == "loss" else 4), "a loss names its micro-batch, a norm its step"
    assert not (tmp_path / "run" / "adapter").exists()


def test_skip_leaves_the_step_out_and_goes_on(config, tmp_path, broken_step):
    broken_step(4, 0, "norm")
    run = train(load_config(config, ["train.on_nonfinite=skip"]))
    assert run.metrics["status"] == "done"
    assert run.metrics["skipped_steps"] == [4]
    (warning,) = [event for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    assert warning["step"] == 4
    assert all(torch.isfinite(t).all() for t in tensors(tmp_path / "run").values())


def test_rows_past_the_models_positions_are_announced(config, tmp_path):
    rows = tmp_path / "data" / "train.jsonl"
    text = "x" * 300
    rows.write_text(
        f'{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "{text}"}}]}}'
    )
    train(load_config(config, ["train.steps=1", "train.accumulate=1"]))
    (warning,) = [event for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    assert "256" in warning["reason"]


@pytest.mark.parametrize("taken, told", [(3 << 30, 1), (1 << 30, 0)])
def test_what_goes_beyond_the_budget_is_said_once(config, tmp_path, monkeypatch, taken, told):
    monkeypatch.setattr("longtune.train.measure.peak_bytes", lambda device: taken)
    train(load_config(config, ["memory=2GiB", "train.steps=3", "train.save_every=1"]))
    warnings = [event["reason"] for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    found = [reason for reason in warnings if "memory allows" in reason]
    assert found == ["3.0 GiB were taken at the peak, and memory allows 2.0 GiB"] * told


def test_lora_plus_raises_the_rate_of_b_alone(config, tmp_path):
    fast = load_config(config, ["train.steps=2", "lora.lora_plus_ratio=4", f"output={tmp_path / 'fast'}"])
    slow = load_config(config, ["train.steps=2", f"output={tmp_path / 'slow'}"])
    train(fast)
    train(slow)
    assert losses(tmp_path / "fast")[1] == losses(tmp_path / "slow")[1]
    assert losses(tmp_path / "fast")[2] < losses(tmp_path / "slow")[2]


def test_callbacks_get_the_same_events_as_the_file(config, tmp_path):
    seen = []
    train(load_config(config, ["train.steps=2"]), seen.append)
    assert seen == read_events(tmp_path / "run")


def test_the_package_can_be_called(config):
    assert train_package(load_config(config, ["train.steps=1"])).step == 1
