"""Shared by the parity tests with TRL: one step of a TRL trainer, and the same rows and adapter for longtune."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as Rows
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback

from longtune.data import load_dataset
from longtune.engine import Engine, Plan
from longtune.objective.base import Objective
from longtune.train.evaluate import add_up
from longtune.tree import Forest, Tree
from tests import support

LORA = dict(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
SETTINGS = dict(
    max_steps=1,
    learning_rate=0.0,
    max_grad_norm=0.0,
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    gradient_checkpointing=False,
    dataloader_pin_memory=False,
)
THEIR_WARNINGS = "ignore:.*(gradient_checkpointing|pin_memory|trl.experimental).*"
"""What transformers' and TRL's trainers warn about among themselves."""


def tokenizer_of(folder: Path) -> Any:
    """The tiny tokenizer without BOS: TRL's ORPO trainer puts one before every row that has none."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = None
    return tokenizer


def word(draw: random.Random, length: int) -> str:
    return "".join(draw.choices("abcdefgh", k=length))


def pair_rows(count: int, *, equal: bool = False, seed: int = 0) -> list[dict[str, str]]:
    """Preference rows of strings; `equal`: all of one length, where means of micro-batches are means of the step."""
    draw = random.Random(seed)

    def length(low: int, high: int) -> int:
        return high if equal else draw.randint(low, high)

    return [
        {
            "prompt": word(draw, length(3, 12)) + ":",
            "chosen": word(draw, length(2, 9)),
            "rejected": word(draw, length(1, 7)) + "z",
        }
        for _ in range(count)
    ]


def trees_of(rows: list[dict[str, Any]], tokenizer: Any, folder: Path, **settings: Any) -> list[Tree]:
    """The rows as longtune reads them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_dataset(str(file), tokenizer, **settings).trees)


class _Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.logs: dict[str, float] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = support.gradients(model)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs = {**logs, **self.logs}


def trl_step(make_trainer: Any, model: torch.nn.Module, rows: list[dict[str, Any]], tokenizer: Any, **extra: Any):
    """One step of a trainer, all rows in it, with the adapter drawn by `draw_adapter`.

    Returns:
        (gradients by name, what the trainer logged, the trainer).
    """
    recorder = _Recorder()
    extra.setdefault("peft_config", LoraConfig(**LORA))
    trainer = make_trainer(
        model=model,
        train_dataset=Rows.from_list(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
        **extra,
    )
    draw_adapter(trainer.model)
    trainer.train()
    return recorder.gradients, recorder.logs, trainer


def draw_adapter(model: torch.nn.Module, seed: int = 5) -> None:
    """Puts the same random A and B into every model with the same layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"\.lora_[AB]\.default\.", name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def our_step(
    model: torch.nn.Module,
    trees: list[Tree],
    objective: Objective,
    batch: int,
    plan: Plan | None = None,
    reference=None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(gradients by name, metrics) of one step over the trees in micro-batches.

    Args:
        reference: makes `longtune.train.references.Reference` of (engine, model), for objectives that use one.
    """
    engine = Engine(model, plan or Plan(chunk_tokens=7))
    try:
        if reference is not None:
            trees = reference(engine, model).attach_all(trees)
        parts = [trees[first : first + batch] for first in range(0, len(trees), batch)]
        forests = [Forest(part, prompt_targets=objective.uses_prompt_targets) for part in parts]
        totals = add_up([objective.totals(forest) for forest in forests])
        sums = add_up([engine.accumulate(forest, objective, totals, (0, i)) for i, forest in enumerate(forests)])
    finally:
        engine.close()
    found = support.gradients(model)
    model.zero_grad()
    return found, objective.metrics(sums, totals)
