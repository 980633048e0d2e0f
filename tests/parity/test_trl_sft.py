"""An SFT step equals TRL's SFTTrainer, and TRL's trainers compute the same on a streamed model (fp32)."""

from __future__ import annotations

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import longtune
from longtune.engine import Plan
from longtune.objective import get
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
    word,
)
from tests.tiny_run import write_model

pytestmark = pytest.mark.filterwarnings(THEIR_WARNINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def rows_of(count):
    draw = random.Random(0)
    return [
        {"prompt": word(draw, draw.randint(2, 9)) + ":", "completion": word(draw, draw.randint(1, 9))}
        for _ in range(count)
    ]


def sft(tmp_path, batch, accumulate):
    return SFTConfig(
        str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        completion_only_loss=True,
        **SETTINGS,
    )


@pytest.mark.parametrize(("batch", "accumulate"), [(1, 1), (3, 1), (1, 4), (2, 4)])
def test_a_step_equals_trls(folder, tmp_path, batch, accumulate):
    tokenizer, rows = tokenizer_of(folder), rows_of(batch * accumulate)
    theirs, logs, _ = trl_step(SFTTrainer, base(folder), rows, tokenizer, args=sft(tmp_path, batch, accumulate))
    model = get_peft_model(base(folder), LoraConfig(**LORA))
    draw_adapter(model)
    ours, metrics = our_step(model, trees_of(rows, tokenizer, tmp_path), get("sft"), batch)
    assert support.worst(ours, theirs) < 1e-5
    assert metrics["loss"] == pytest.approx(logs["loss"], rel=1e-5)


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_computes_the_same_on_a_streamed_model(folder, tmp_path, method, when):
    """The model may be streamed before the trainer puts its own head on it, or afterwards."""
    tokenizer = tokenizer_of(folder)
    if method == "sft":
        make, arguments, rows = SFTTrainer, sft(tmp_path, 2, 2), rows_of(4)
    else:
        settings = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, beta=0.3, **SETTINGS)
        make, arguments, rows = DPOTrainer, DPOConfig(str(tmp_path), **settings), pair_rows(4)
    theirs, logs, _ = trl_step(make, base(folder), rows, tokenizer, args=arguments)
    plan, handles = Plan(chunk_tokens=7), []
    if when == "after":

        def make_streamed(**given):
            trainer = make(**given)
            handles.append(longtune.stream(trainer.model, plan=plan))
            return trainer

        ours, our_logs, _ = trl_step(make_streamed, base(folder), rows, tokenizer, args=arguments)
    else:
        model = get_peft_model(base(folder), LoraConfig(**LORA))
        handles.append(longtune.stream(model, plan=plan))
        # TRL would take a model with an adapter for its own reference.
        extra = {} if method == "sft" else {"ref_model": base(folder)}
        ours, our_logs, _ = trl_step(make, model, rows, tokenizer, args=arguments, peft_config=None, **extra)
    handles[0].close()
    assert support.worst(ours, theirs) < 1e-5
    assert our_logs["loss"] == pytest.approx(logs["loss"], rel=1e-5)
