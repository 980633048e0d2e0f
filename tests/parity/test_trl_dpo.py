"""A DPO step equals TRL's DPOTrainer: loss, metrics and every adapter gradient (fp32)."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from longtune.model.reference import load_reference
from longtune.objective import get
from longtune.train.references import Reference
from tests import support
from tests.parity.trl_step import (
    LORA,
    SETTINGS,
    THEIR_WARNINGS,
    draw_adapter,
    our_step,
    pair_rows,
    tokenizer_of,
    trees_of,
    trl_step,
)
from tests.tiny_run import write_model

pytestmark = pytest.mark.filterwarnings(THEIR_WARNINGS)

METRICS = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def config(tmp_path, batch, accumulate, **settings):
    return DPOConfig(
        str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, **SETTINGS, **settings
    )


def check(ours, theirs, metrics, logs):
    assert support.worst(ours, theirs) < 1e-5
    # Rewards and margins are small differences of fp32 sums: their error is one of the sums.
    size = 0.3 * max(abs(logs["logps/chosen"]), abs(logs["logps/rejected"]))
    for name, own in METRICS.items():
        allowed = 1e-5 * (size if "reward" in name and "acc" not in name else abs(logs[name]))
        assert metrics[own] == pytest.approx(logs[name], rel=0, abs=allowed), name


@pytest.mark.parametrize(
    ("loss", "smoothing", "batch", "accumulate"),
    [
        ("sigmoid", 0.0, 1, 1),
        ("sigmoid", 0.0, 3, 1),
        ("sigmoid", 0.0, 1, 4),
        ("sigmoid", 0.0, 3, 4),
        ("ipo", 0.0, 1, 4),
        ("ipo", 0.0, 3, 1),
        ("hinge", 0.0, 3, 1),
        ("hinge", 0.0, 1, 4),
        ("robust", 0.2, 3, 1),
        ("robust", 0.2, 1, 4),
    ],
)
def test_a_step_equals_trls(folder, tmp_path, loss, smoothing, batch, accumulate):
    tokenizer, rows = tokenizer_of(folder), pair_rows(batch * accumulate)
    arguments = config(tmp_path, batch, accumulate, beta=0.3, loss_type=loss, label_smoothing=smoothing)
    theirs, logs, _ = trl_step(DPOTrainer, base(folder), rows, tokenizer, args=arguments)
    model = get_peft_model(base(folder), LoraConfig(**LORA))
    draw_adapter(model)
    trees = trees_of(rows, tokenizer, tmp_path, method="dpo")
    assert all(len(tree.nodes) == 3 for tree in trees), "the prompt is shared"
    objective = get("dpo", beta=0.3, loss=loss, label_smoothing=smoothing)
    ours, metrics = our_step(model, trees, objective, batch, reference=Reference)
    check(ours, theirs, metrics, logs)


def test_a_frozen_adapter_as_the_reference_equals_trls(folder, tmp_path):
    """Given a model with an adapter, TRL keeps a copy of it as the reference."""
    tokenizer, rows = tokenizer_of(folder), pair_rows(3)

    def tuned():
        model = get_peft_model(base(folder), LoraConfig(**LORA))
        draw_adapter(model, seed=1)
        return model

    arguments = config(tmp_path, 3, 1, beta=0.3)
    theirs, logs, trainer = trl_step(DPOTrainer, tuned(), rows, tokenizer, args=arguments, peft_config=None)
    assert "ref" in trainer.model.peft_config
    tuned().save_pretrained(tmp_path / "frozen", save_embedding_layers=False)
    model = tuned()
    load_reference(model, tmp_path / "frozen")
    draw_adapter(model)
    ours, metrics = our_step(
        model, trees_of(rows, tokenizer, tmp_path, method="dpo"), get("dpo", beta=0.3), 3, reference=Reference
    )
    check(ours, theirs, metrics, logs)
