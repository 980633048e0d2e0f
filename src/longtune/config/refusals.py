"""What the schema allows, key by key, and a run still can't honour: values that contradict each other, and values
that nothing of the run would read.

Only what the config alone tells is here. What the data, the tokenizer or the model decide is refused where they are
loaded (`train/unread.py`, `model/rank_sources.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from longtune.config.schema import LEARNING_RATES, MemoryPlan, RunConfig
from longtune.errors import counted

MOST = {
    "train.epochs": (10_000, "set train.steps instead, which has no such limit"),
    "train.accumulate": (1_000_000, "set it to a smaller number: a step's rows are held in memory"),
    "train.learning_rate": (1_000, "2e-4 is usual"),
    "lora.lora_plus_ratio": (1_000_000, "16 is usual"),
    "lora.alpha": (1_000_000, "twice the rank is usual"),
    "data.weight": (10_000, "give the other sources a smaller weight instead"),
}
"""The largest numbers that somebody may mean, far above any that is of use, and what to do instead. What is larger
ends in an overflow, or is never done with."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When some keys are read.

    Attributes:
        keys: dotted keys; a section means all of its keys.
        by: the keys that decide it.
        read: whether a run by this config reads them.
        why: why it doesn't.
        fix: what else would help, after "leave it out, or".
    """

    keys: tuple[str, ...]
    by: tuple[str, ...]
    read: Callable[[RunConfig], bool]
    why: Callable[[RunConfig], str]
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Unread:
    """A key with a value of its own (not its default) that nothing reads.

    Attributes:
        key: dotted.
        by: the keys that decide it.
        why, fix: for a `Problem`.
    """

    key: str
    by: tuple[str, ...]
    why: str
    fix: str


def _of_method(method: str) -> Rule:
    return Rule(
        keys=(method,),
        by=("method",),
        read=lambda config: config.method == method,
        why=lambda config: f"is for method {method}, and this run's is {config.method}",
        fix=f"use method {method}",
    )


def _keep(config: RunConfig) -> tuple[str | None, bool, str]:
    """`keep` (None: the planner's choice), whether `keep_layers` is given, and `keep_below`."""
    memory = config.memory
    if not isinstance(memory, MemoryPlan):
        return None, False, "nothing"
    return memory.keep if "keep" in memory.model_fields_set else None, memory.keep_layers is not None, memory.keep_below


def _reads_keep_layers(config: RunConfig) -> bool:
    keep, _, below = _keep(config)
    return keep != "nothing" or below != "nothing"


def _reads_keep_below(config: RunConfig) -> bool:
    # Of all activations or attention outputs the planner may keep those of the last layers alone.
    keep, counted, _ = _keep(config)
    return counted or keep not in ("nothing", "kv")


RULES = (
    *(_of_method(method) for method in LEARNING_RATES if method in RunConfig.model_fields),
    Rule(
        keys=("dpo.label_smoothing",),
        by=("dpo.loss",),
        read=lambda config: config.dpo.loss in ("sigmoid", "robust"),
        why=lambda config: f"has no meaning under loss {config.dpo.loss}",
        fix="use sigmoid or robust",
    ),
    Rule(
        keys=("train.loss_normalisation",),
        by=("method",),
        read=lambda config: config.method == "sft",
        why=lambda config: f"has no meaning under {config.method}, whose loss is a mean over pairs",
    ),
    Rule(
        keys=("train_on",),
        by=("method",),
        read=lambda config: config.method == "sft",
        why=lambda config: f"has no meaning under {config.method}, which trains both answers whole",
    ),
    Rule(
        keys=("answer_after",),
        by=("method",),
        read=lambda config: config.method == "sft",
        why=lambda config: f"is for text rows, and {config.method} reads pairs of answers",
    ),
    Rule(
        keys=("lora.sensitivity",),
        by=("lora.rank_policy",),
        read=lambda config: config.lora.rank_policy == "by_kl",
        why=lambda config: f"has no meaning under rank_policy {config.lora.rank_policy}",
        fix="use rank_policy by_kl",
    ),
    Rule(
        keys=("train.warmup_ratio",),
        by=("train.warmup_steps",),
        read=lambda config: config.train.warmup_steps is None,
        why=lambda config: "warmup_steps is given too, and wins",
        fix="leave warmup_steps out",
    ),
    Rule(
        keys=("train.eval_rows",),
        by=("train.eval_every",),
        read=lambda config: config.train.eval_every > 0,
        why=lambda config: "nothing is validated: eval_every is 0",
        fix="set train.eval_every",
    ),
    Rule(
        keys=("samples.max_new_tokens", "samples.max_prompt_tokens"),
        by=("samples.prompts",),
        read=lambda config: config.samples.prompts not in (0, ""),
        why=lambda config: "no sample answers are asked for",
        fix="set samples.prompts",
    ),
    Rule(
        keys=("samples.max_prompt_tokens",),
        by=("samples.prompts",),
        read=lambda config: isinstance(config.samples.prompts, int),
        why=lambda config: "is for prompts of validation rows, and these are your own",
        fix="set samples.prompts to a number",
    ),
    Rule(
        keys=("memory.keep_layers",),
        by=("memory.keep", "memory.keep_below"),
        read=_reads_keep_layers,
        why=lambda config: "says of how many layers `keep` is meant, and keep is nothing",
        fix="set memory.keep",
    ),
    Rule(
        keys=("memory.keep_below",),
        by=("memory.keep", "memory.keep_layers"),
        read=_reads_keep_below,
        why=lambda config: "is for the layers below keep_layers, which is not given",
        fix="set memory.keep_layers",
    ),
)
"""A new key that only some runs read gets a rule here."""


def unread(config: RunConfig) -> Iterator[Unread]:
    """Every key that differs from its default and that no run by this config reads, each once."""
    values = _flat(config)
    defaults = _flat(RunConfig(data="none")) | {f"memory.{key}": value for key, value in dict(MemoryPlan()).items()}
    told: set[str] = set()
    for rule in RULES:
        if rule.read(config):
            continue
        for key, value in values.items():
            meant = any(key == name or key.startswith(f"{name}.") for name in rule.keys)
            if meant and key not in told and value != defaults.get(key):
                told.add(key)
                yield Unread(key, rule.by, rule.why(config), f"leave it out{rule.fix and f', or {rule.fix}'}")


def _flat(config: RunConfig) -> dict[str, Any]:
    """Values by dotted key, one level of sections deep: deeper ones are values."""
    flat: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        if isinstance(value, dict) and key not in ("columns", "chat_template_kwargs"):
            flat |= {f"{key}.{inner}": inside for inner, inside in value.items()}
        else:
            flat[key] = value
    return flat


def supported_methods() -> tuple[str, ...]:
    """The methods that `longtune.objective` has an objective for."""
    try:
        return tuple(importlib.import_module("longtune.objective").OBJECTIVES)
    except (ImportError, AttributeError):
        return ("sft",)


def contradictions(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(key, reason, fix) of every value that can't be honoured beside the others."""
    train = config.train
    methods = supported_methods()
    if config.method not in methods:
        yield "method", f"{config.method} is not supported yet", f"use {' or '.join(methods)}"
    if train.steps is not None and train.epochs is not None:
        yield "train.epochs", "steps and epochs are both given", "leave one of them out"
    if train.tokens_per_batch is not None and train.batch_size != 1:
        yield "train.tokens_per_batch", "batch_size and tokens_per_batch are both given", "leave one of them out"
    if train.steps is not None:
        yield from warmup_refusal(config, train.steps)
    every_save_validated = train.eval_every and train.save_every and train.save_every % train.eval_every == 0
    if train.keep.startswith("best") and not every_save_validated:
        why = "the best checkpoint is known only if every saved step is validated"
        yield "train.keep", why, "make save_every a multiple of eval_every, both above 0"
    if train.keep in ("best margin", "best accuracy") and config.method == "sft":
        yield "train.keep", f"sft has no {train.keep.removeprefix('best ')}", "use best, by validation loss"
    if len(set(config.track)) < len(config.track):
        yield "track", "a tracker is named twice", "name it once"


def warmup_refusal(config: RunConfig, steps: int) -> Iterator[tuple[str, str, str]]:
    """(key, reason, fix) where a run of so many steps would end within its warm-up."""
    warmup = config.train.warmup_steps
    if warmup is not None and warmup >= steps:
        why = f"the warm-up of {counted(warmup, 'step')} is as long as the run ({counted(steps, 'step')}), or longer"
        yield "train.warmup_steps", why, f"set it to {steps - 1} at most, or leave it out"


def extremes(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(key, reason, fix) of every number that is larger than anybody means."""
    values = _flat(config)
    sources = () if isinstance(config.data, str) else config.data
    weights = [(f"data.{number}.weight", "data.weight", source.weight) for number, source in enumerate(sources)]
    for place, key, value in [*((key, key, values.get(key)) for key in MOST), *weights]:
        most, fix = MOST[key]
        if value is not None and value > most:
            yield place, f"must be at most {most:,}, not {value:g}", fix
