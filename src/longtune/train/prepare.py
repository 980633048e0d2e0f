"""Everything that a run needs, loaded and checked before its folder is made: bad input leaves nothing written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from longtune import objective as objectives
from longtune.config import MemoryPlan, RunConfig
from longtune.data import Dataset, load_dataset, split_sources
from longtune.data.progress import reading_bar
from longtune.data.report import past_positions
from longtune.data.run_length import RunLength
from longtune.data.sources import resolve
from longtune.engine import Engine, Plan
from longtune.errors import Problem, UserError
from longtune.model.adapters import add_lora, init_adapter, load_adapter
from longtune.model.embedded import cache_folder
from longtune.model.loading import Loaded, choose_device, load_model
from longtune.model.meta import positions_of
from longtune.model.rank_sources import find_figures, lora_ranks
from longtune.model.ranks import Ranks
from longtune.model.reference import load_reference
from longtune.model.targets import left_out
from longtune.objective.base import Objective
from longtune.train.length import batcher, checked_length
from longtune.train.planning import Planned, plan_run
from longtune.train.unread import idle_validation, unread_settings, unread_sharing


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run's parts.

    Attributes:
        loaded: base model and tokenizer.
        model: the base with its trainable adapter.
        train, valid: the data; valid is None without validation data.
        engine: walks the model by its plan.
        planned: why it walks by that plan, and what it is predicted to take.
        length: steps and rows of the run.
        warnings: what the user should know before the first step.
        ranks: the rank of every adapted module; None where the adapter came from a checkpoint.
    """

    loaded: Loaded
    model: PeftModel
    train: Dataset
    valid: Dataset | None
    objective: Objective
    engine: Engine
    planned: Planned
    length: RunLength
    warnings: tuple[str, ...]
    ranks: Ranks | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def prepare(
    config: RunConfig, checkpoint: Path | None = None, planned: Planned | None = None, *, resumed: bool = False
) -> Prepared:
    """Loads model, adapter and data, and tries the engine on them.

    Args:
        checkpoint: take the adapter from this folder instead of making a fresh one.
        planned: the plan of a run that is resumed: another one would round differently.
        resumed: the run was started already, so settings that nothing reads are left alone.

    Raises:
        UserError: with the problems of plan, model, data and adapter together, as far as they can be told apart.
    """
    problems: list[Problem] = []
    train_source, valid_source = None, None
    with _collect(problems):
        choose_device(config.device)
    with _collect(problems):
        train_source, valid_source = data_sources(config)
    if problems:
        raise UserError(problems)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        quantise=config.quantise_on_load,
    )
    train = valid = model = ranks = found = None
    untargeted: list[str] = []
    if not resumed:
        with _collect(problems):
            problems += unread_settings(config, valid_source, loaded.tokenizer)
    with _collect(problems):
        train = load_data(config, train_source, loaded.tokenizer)
        found = checked_length(config, batcher(config, train))
    with _collect(problems):
        valid = load_data(config, valid_source, loaded.tokenizer) if valid_source is not None else None
    with _collect(problems):
        untargeted = left_out(loaded.model, config.lora.targets)
        model, ranks = _add_adapter(config, loaded, checkpoint)
        if (frozen := frozen_adapter(config)) is not None:
            load_reference(model, frozen)
    if train is not None and not resumed:
        problems += unread_sharing(config, [train, valid] if valid else [train])
    if train is None or found is None or model is None or problems:
        raise UserError(problems)
    engine = Engine(model, plan=planned.plan if planned else Plan(), seed=config.train.seed)
    try:
        _check_rows(engine, config, [train, valid] if valid else [train])
        if planned is None:
            planned = plan_run(config, engine, train)
            engine.set_plan(planned.plan)
        engine.compile = planned.compile
    except UserError:
        engine.close()
        raise
    positions = positions_of(loaded.model.config)
    warnings = (
        *planned.warnings,
        *idle_validation(config, valid_source),
        *found.not_reached(train.shares),
        *past_positions(train.report.longest, positions),
        *past_positions(valid.report.longest if valid else 0, positions, "the longest row of validation"),
        *untargeted,
        *(ranks.notes if ranks else ()),
    )
    return Prepared(loaded, model, train, valid, make_objective(config), engine, planned, found, warnings, ranks)


def make_objective(config: RunConfig) -> Objective:
    """The objective of the run's method, with its settings."""
    dpo, orpo, simpo = config.dpo, config.orpo, config.simpo
    settings: dict[str, dict[str, Any]] = {
        "sft": {"normalisation": config.train.loss_normalisation},
        "dpo": {"beta": dpo.beta, "loss": dpo.loss, "label_smoothing": dpo.label_smoothing},
        "orpo": {"weight": orpo.lambda_, "sft_scope": orpo.sft_scope},
        "simpo": {"beta": simpo.beta, "gamma": simpo.gamma},
    }
    return objectives.get(config.method, **settings[config.method])


def data_sources(config: RunConfig) -> tuple[Any, Any]:
    """Training and validation sources as `load_dataset` takes them, found to exist.

    A folder brings its own validation file; `valid` wins over it.
    """
    named = config.data if isinstance(config.data, str) else [source.model_dump() for source in config.data]
    train, found = split_sources(named)
    valid = config.valid or found
    problems: list[Problem] = []
    for source in (train, valid):
        with _collect(problems):
            if source is not None:
                resolve(source)
    if problems:
        raise UserError(problems)
    return train, valid


def load_data(config: RunConfig, source: Any, tokenizer: Any) -> Dataset:
    """A source as token trees, by the run's settings."""
    with reading_bar(source) as progress:
        return load_dataset(
            source,
            tokenizer,
            progress=progress,
            cache=cache_folder() / "tokens" if config.token_cache else None,
            **data_settings(config),
        )


def data_settings(config: RunConfig) -> dict[str, Any]:
    """The run's settings of its data, as `load_dataset` and `check_data` take them."""
    return dict(
        method=config.method,
        train_on=config.train_on,
        answer_after=config.answer_after,
        max_tokens=config.train.max_tokens,
        overlong=config.train.overlong,
        template_kwargs=config.chat_template_kwargs,
        columns=config.columns,
        prompt_sharing=config.prompt_sharing,
        bad_rows=config.bad_rows,
    )


def planned_ranks(config: RunConfig, model: PreTrainedModel, folder: Path | None) -> Ranks:
    """The rank that the run gives each adapted module; the model stays as it is.

    Args:
        model: without an adapter; its weights need no values.
        folder: where it lies on this disk.

    Raises:
        UserError: targets, ranks or sensitivities that the user must change.
    """
    lora = config.lora
    figures = find_figures(model, folder, policy=lora.rank_policy, sensitivity=lora.sensitivity)
    return lora_ranks(model, figures, rank=lora.rank, policy=lora.rank_policy, targets=lora.targets, layers=lora.layers)


def _add_adapter(config: RunConfig, loaded: Loaded, checkpoint: Path | None) -> tuple[PeftModel, Ranks | None]:
    if checkpoint is not None:
        return load_adapter(loaded.model, checkpoint, trainable=True), None
    lora = config.lora
    ranks = planned_ranks(config, loaded.model, loaded.path)
    model = add_lora(
        loaded.model,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        layers=lora.layers,
        dropout=lora.dropout,
        rslora=lora.rslora,
        seed=config.train.seed,
        rank_policy=lora.rank_policy,
        bits=ranks.bits,
        kl=ranks.kl,
    )
    if config.init_adapter is not None:
        init_adapter(model, config.init_adapter)
    return model, ranks


def frozen_adapter(config: RunConfig) -> str | None:
    """The adapter that is the reference of this run; None where it is the base model, or there is none."""
    return config.dpo.reference_adapter if config.method == "dpo" else None


def _check_rows(engine: Engine, config: RunConfig, data: Sequence[Dataset]) -> None:
    """Refuses rows that the model can't be walked over, which would otherwise come up in the middle of the run."""
    if engine.unchunkable is None:
        return
    longest = max(dataset.report.longest for dataset in data)
    limit = config.memory.chunk_tokens if isinstance(config.memory, MemoryPlan) else None
    problems = []
    if config.train.batch_size > 1 or config.train.tokens_per_batch is not None:
        problems.append(Problem("train.batch_size", f"{engine.unchunkable}: rows can't be packed", "use batch_size 1"))
    if limit is not None and longest > limit:
        why = f"{engine.unchunkable}: a row must be one chunk, and the longest has {longest} tokens, not {limit}"
        problems.append(Problem("memory", why, f"set memory.chunk_tokens to {longest}, or null"))
    if any(dataset.branched for dataset in data):
        problems.append(Problem("method", f"{engine.unchunkable}: answers can't share a prompt", "use sft"))
    if problems:
        raise UserError(problems)


@contextmanager
def _collect(problems: list[Problem]) -> Iterator[None]:
    """Gathers a part's problems, so that the other parts are looked at too."""
    try:
        yield
    except UserError as error:
        # What is wrong with a setting of the data comes up for training and validation rows alike.
        problems.extend(problem for problem in error.problems if problem not in problems)
