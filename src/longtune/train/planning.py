"""How a run gets its plan: its longest micro-batch, the memory it may take, and the planner's choice.

`plan_run` serves a run whose model is loaded; `plan` (also `longtune.plan`) a config alone, for this machine or for a
device that isn't here. What a plan takes is the planner's work (`engine/planner.py`).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from longtune.config import Config, MemoryPlan, RunConfig, TrainConfig, check_config
from longtune.data import Batcher, Dataset
from longtune.data.report import past_positions
from longtune.engine import Engine, Plan, cost, devices
from longtune.engine.budget import CONTEXT, Budget, budget_here, memory_bytes
from longtune.engine.candidates import KEYS
from longtune.engine.devices import Device
from longtune.engine.forecast import Row
from longtune.engine.planner import Planner, Prediction
from longtune.errors import DoesNotFit, Problem, UserError, counted
from longtune.model.adapters import add_lora
from longtune.model.embedded import EMBEDDED, embedded_folder
from longtune.model.loading import choose_device, choose_dtype, load_model, load_tokenizer
from longtune.model.meta import meta_model, positions_of
from longtune.model.ranks import Ranks
from longtune.train.length import batcher, checked_length, length
from longtune.train.unread import unread_settings
from longtune.tree import Forest

AUTO_CHUNK = 8192
"""Tokens of a chunk where nothing can be predicted."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A run's plan.

    Attributes:
        plan: the plan.
        reason: why it is that one.
        predicted: what it takes, as plain JSON values; None where that can't be told.
        warnings: what the user should know.
        compile: whether the layers are compiled.
    """

    plan: Plan
    reason: str
    predicted: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    compile: bool = False


def choose_plan(memory: str | MemoryPlan, device: torch.device) -> tuple[Plan, str]:
    """A plan without any prediction: the keys that `memory` gives, over ones that keep memory low."""
    store: Any = "device" if device.type == "cpu" else "host"
    cautious = Plan(chunk_tokens=AUTO_CHUNK, layers_per_segment=1, boundary_store=store, head_chunk=1024)
    given = given_keys(memory)
    return replace(cautious, **given), "set in the config" if given else "keeps memory low; nothing is predicted"


def given_keys(memory: str | MemoryPlan) -> dict[str, Any]:
    """The keys of the plan that a config gives."""
    return memory.model_dump(exclude_unset=True) if isinstance(memory, MemoryPlan) else {}


def plan_run(config: RunConfig, engine: Engine, data: Dataset, at_most: int | None = None) -> Planned:
    """The plan of a run whose model is loaded.

    Args:
        at_most: device bytes that may be counted on, however many are free (after a plan once failed).

    Raises:
        DoesNotFit: no plan fits, with what would.
    """
    device = engine.stack.device
    fixed = given_keys(config.memory)
    if device.type not in ("cpu", "cuda"):
        plan, reason = choose_plan(config.memory, device)
        return Planned(plan, reason, compile=config.compile is True)
    objective_takes_one = config.method == "sft"
    try:
        planner = Planner(
            engine.model,
            devices.measured(engine.stack.device, engine.stack.dtype, engine.stack.model.config),
            like=engine,
            accumulate=config.train.accumulate,
            one_pass=objective_takes_one,
        )
    except (UserError, NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        return _unpredicted(config, device, error)
    with planner:
        if at_most is None:  # Else it was asked before the run began.
            _check_layers(planner, fixed)
        row = _longest(batcher(config, data), data)
        budget = _budget(config, device)
        if at_most is not None:
            budget = replace(budget, device=min(budget.device, at_most))
        try:
            chosen = _choose(planner, row, budget, fixed)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            return _unpredicted(config, device, error)
        if chosen is None:
            raise _does_not_fit(planner, config, row, budget, fixed)
        compiled, why = _compiling(config, data, chosen, row)
        reason = _reason(config, budget, fixed) + why
        told = tuple(_unused(chosen.plan, fixed))
        return Planned(chosen.plan, reason, _predicted(chosen, planner, config), told, compiled)


def _compiling(config: RunConfig, data: Dataset, chosen: Prediction, row: Forest | Row) -> tuple[bool, str]:
    """Whether the layers are compiled, and what is said of it."""
    if config.compile != "auto":
        return config.compile, "; layers compiled, as the config says" if config.compile else ""
    shape = Row.of(row)
    chunk, train = chosen.plan.chunk_tokens, config.train
    one_chunk = chunk is None or shape.tokens <= chunk
    if not one_chunk and shape.tokens < 2 * cast(int, chunk):
        return False, ""  # The odd last chunk, half of the row or so, is not compiled.
    steps = length(config, batcher(config, data)).steps
    eager, compiled = (x.total * train.accumulate for x in (chosen.seconds, chosen.compiled))
    if not cost.compiling_pays(eager, compiled, steps, any_size=one_chunk):
        return False, ""
    return True, f"; layers compiled, which saves about {eager - compiled:.2g} s of each step"


def _check_layers(planner: Planner, fixed: Mapping[str, Any]) -> None:
    there = planner.forecaster.ghost.layers
    means_all = {"keep_layers": "leave the key out", "layers_per_segment": "write null"}
    problems = [
        Problem(
            f"memory.{key}",
            f"{counted(fixed[key], 'layer')}, and the model has {there}",
            f"give {there} at most, or {all_of_them} for all of them",
        )
        for key, all_of_them in means_all.items()
        if (fixed.get(key) or 0) > there
    ]
    if problems:
        raise UserError(problems)


def _unused(plan: Plan, fixed: Mapping[str, Any]) -> list[str]:
    """What to say of keys that were given and that the plan, as the planner chose the others, does not read."""
    everything = plan.keep == "everything" and plan.keep_layers is None
    named = {
        "keep_layers": plan.keep == "nothing" and plan.keep_below == "nothing",
        "keep_below": plan.keep_layers is None,
        "halves": everything,
        "layers_per_segment": everything,
        "boundary_store": everything,
    }
    what = f"{plan.keep} of {'all' if plan.keep_layers is None else plan.keep_layers} layers"
    return [
        f"memory.{key} has no effect in the plan that was chosen, which keeps {what}"
        for key, unread in named.items()
        if unread and key in fixed and fixed[key] != getattr(Plan(), key)
    ]


def _choose(planner: Planner, row: Forest | Row, budget: Budget, fixed: Mapping[str, Any]) -> Prediction | None:
    if set(KEYS) <= set(fixed):
        # The user has decided; only a run that is sure to fail is refused, by itself.
        return planner.predict(Plan(**fixed), row)
    return planner.choose(row, budget, fixed)


def _predicted(chosen: Prediction, planner: Planner, config: RunConfig) -> dict[str, Any]:
    return {
        **chosen.as_dict(),
        "seconds_per_step": chosen.seconds.total * config.train.accumulate,
        "device": planner.device.name,
        "rates": planner.device.source,
    }


def _unpredicted(config: RunConfig, device: torch.device, error: Exception) -> Planned:
    plan, reason = choose_plan(config.memory, device)
    why = " ".join(str(error).split())[:160] or type(error).__name__
    told = (f"memory and time can't be predicted for this model ({why})",)
    return Planned(plan, reason, None, told, config.compile is True)


def _longest(batches: Batcher, data: Dataset) -> Forest:
    """The longest micro-batch that the run can have."""
    return Forest([data.trees[row] for row in batches.largest()])


def asked_bytes(config: RunConfig) -> int | None:
    """Bytes that the config allows; None where it leaves them open."""
    return memory_bytes(config.memory) if isinstance(config.memory, str) else None


def _budget(config: RunConfig, device: torch.device) -> Budget:
    return budget_here(device, asked_bytes(config), shutil.disk_usage(tempfile.gettempdir()).free)


def _reason(config: RunConfig, budget: Budget, fixed: Mapping[str, Any]) -> str:
    if set(KEYS) <= set(fixed):
        return "set in the config"
    rest = f"; {', '.join(sorted(fixed))} set in the config" if fixed else ""
    source = "free" if given_keys(config.memory) or config.memory == "auto" else "allowed"
    return f"the fastest that fits {size(budget.device, up=False)} ({source}){rest}"


def _does_not_fit(
    planner: Planner, config: RunConfig, row: Forest | Row, budget: Budget, fixed: Mapping[str, Any]
) -> DoesNotFit:
    least = planner.smallest(row, budget, fixed)
    where = "memory"
    what = f"the longest micro-batch has {least.tokens:,} tokens and needs {size(least.needed_bytes)} at least"
    have = f"{size(budget.device, up=False)} may be taken"
    if least.needed_bytes <= budget.device:
        off = "host" if least.host_bytes > budget.host else "disk"
        needs, has = (least.host_bytes, budget.host) if off == "host" else (least.disk_bytes, budget.disk)
        what = f"the longest micro-batch has {least.tokens:,} tokens and needs {size(needs)} of {off} memory"
        have = f"{size(has, up=False)} are free"
    fixes = [fix for fix, _ in find_fixes(planner, config, row, budget, fixed)]
    return DoesNotFit(Problem(where, f"{what}, and {have}", "; or ".join(fixes[:3])))


def find_fixes(
    planner: Planner, config: RunConfig, row: Forest | Row, budget: Budget, fixed: Mapping[str, Any]
) -> list[tuple[str, Prediction | None]]:
    """What would make a run fit, from cheap to dear; each was tried.

    Returns:
        (what to do, the prediction with it).
    """
    found: list[tuple[str, Prediction | None]] = []
    shape = Row.of(row)
    if fixed and (freed := planner.choose(row, budget)) is not None:
        found.append((f"leave {', '.join(f'memory.{key}' for key in sorted(fixed))} to the planner", freed))
    roomy = replace(budget, host=1 << 62, disk=1 << 62)
    least = planner.smallest(row, roomy, fixed)
    if least.fits(roomy) and not least.fits(budget):
        found.append((f"free {size(least.host_bytes + least.disk_bytes)} of host memory or disk", least))
    train = config.train
    longest = planner.largest_row(budget, fixed)
    if isinstance(row, Forest) and len(row.trees) > 1:
        alone = max(tree.size for tree in row.trees)
        key = "tokens_per_batch" if train.tokens_per_batch is not None else "batch_size"
        value = alone if train.tokens_per_batch is not None else 1
        if alone <= longest:
            found.append((f"set train.{key} to {value}", planner.smallest(Row(alone, shape.trained), budget, fixed)))
    if longest >= 16 and longest < shape.tokens:
        fix = f"set train.max_tokens to {longest} (train.overlong says what happens to longer rows)"
        found.append((fix, planner.smallest(Row(longest), budget, fixed)))
    if least.needed_bytes > budget.device:
        if planner.device.kind == "cpu":
            # The process itself takes a little more or less each time.
            found.append((f"set memory to {size(int(1.05 * least.needed_bytes))}", least))
        else:
            found.append((f"use a device with {size(least.needed_bytes)}", least))
    return found


def size(count: int, up: bool = True) -> str:
    """Bytes, rounded up (what is said to be enough is) or down (so much is there)."""
    rounded = math.ceil if up else math.floor
    if count >= 1 << 30:
        return f"{rounded(count / (1 << 30) * 10) / 10:.1f} GiB"
    return f"{rounded(count / (1 << 20))} MiB" if count >= 1 << 20 else f"{rounded(count / (1 << 10))} KiB"


# a config alone


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What `longtune plan` says of a run.

    Attributes:
        fits: whether some plan fits.
        tokens: of the longest micro-batch.
        device: the device that was planned for.
        budget: bytes that may be taken.
        prediction: of the chosen plan; of the smallest where none fits.
        seconds_per_step: of a step of the longest micro-batches.
        first_step_seconds: what pinning host memory adds to the first step.
        run_seconds: of the whole run; None where its data wasn't read.
        largest_row: tokens of the longest single row that fits this budget.
        fixes: what to do where it doesn't fit, from cheap to dear; each was tried.
        ranks: the rank of every adapted module.
        notes: what the user should know of the data.
    """

    fits: bool
    tokens: int
    device: Device
    budget: Budget
    prediction: Prediction
    seconds_per_step: float
    first_step_seconds: float
    run_seconds: float | None
    largest_row: int
    fixes: tuple[str, ...]
    ranks: Ranks
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.prediction.plan

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "fits": self.fits,
            "tokens": self.tokens,
            "device": self.device.name,
            "rates": self.device.source,
            "budget": {"device": self.budget.device, "host": self.budget.host, "disk": self.budget.disk},
            "plan": self.plan.as_dict(),
            "predicted": self.prediction.as_dict(),
            "seconds_per_step": self.seconds_per_step,
            "first_step_seconds": self.first_step_seconds,
            "run_seconds": self.run_seconds,
            "largest_row": self.largest_row,
            "fixes": list(self.fixes),
            "ranks": self.ranks.describe(),
            "notes": list(self.notes),
        }


def plan(
    config: Config,
    *,
    device: str | None = None,
    device_memory: str | None = None,
    tokens: int | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> RunPlan:
    """Whether and how a run fits, and how long it takes, before anything is trained.

    No weights are read, unless they are stored in a way that only loading tells (packed, GGUF).

    Args:
        config: the run, its keys as plain values, or a file of them; `memory` is its budget.
        device: a known device that need not be here (`engine.devices.names()`); None is the run's own.
        device_memory: bytes of that device ("24GB"), instead of what is known of it.
        tokens: plan for a row of so many tokens, without reading the data; see `row_of`.
        on_stage: is told what is being done.

    Raises:
        UserError: the config, its model or its data must be changed.
    """
    config = check_config(config)
    if tokens is not None:
        tokens, _ = row_of(tokens, config)
    away = devices.known(device) if device is not None else None
    here = torch.device("cpu") if away is not None else choose_device(config.device)
    if away is not None:
        dtype = torch.bfloat16 if config.dtype == "auto" and away.name != "t4" else choose_dtype(config.dtype, here)[0]
    else:
        dtype = choose_dtype(config.dtype, here)[0]
    say = on_stage or (lambda what: None)
    say("reading the data" if tokens is None else f"planning for {tokens:,} tokens")
    rows = _rows(config, tokens)
    say(f"reading the shapes of {config.model}")
    model, ranks = _model(config, dtype)
    notes = (*rows.notes, *past_positions(rows.longest, positions_of(model.config)))
    say("measuring this device" if away is None else f"planning for {away.name}")
    target = away or devices.measured(here, dtype, model.get_base_model().config)
    budget = _budget_for(config, away, here, device_memory)
    fixed = given_keys(config.memory)
    one_pass, accumulate = config.method == "sft", config.train.accumulate
    with Planner(model, target, accumulate=accumulate, one_pass=one_pass) as planner:
        _check_layers(planner, fixed)
        row = rows.largest
        shape = Row.of(row)
        say(f"looking for the fastest plan for {shape.tokens:,} tokens")
        chosen = planner.choose(row, budget, fixed)
        shown = chosen or planner.smallest(row, budget, fixed)
        say("looking for the longest row that fits")
        fixes = [] if chosen else [fix for fix, _ in find_fixes(planner, config, row, budget, fixed)]
        return RunPlan(
            fits=chosen is not None,
            tokens=shown.tokens,
            device=target,
            budget=budget,
            prediction=shown,
            seconds_per_step=shown.seconds.total * accumulate,
            first_step_seconds=shown.seconds.first,
            run_seconds=_whole_run(planner, shown, shape, rows) if rows.sizes else None,
            largest_row=planner.largest_row(budget, fixed),
            fixes=tuple(fixes),
            ranks=ranks,
            notes=notes,
        )


def row_of(tokens: int, config: RunConfig) -> tuple[int, str]:
    """What a run makes of a row of so many tokens: (tokens that are planned for, what to say of it).

    A `max_tokens` of the config's own is kept; its default alone is no wish to have shorter rows.
    """
    most, overlong = config.train.max_tokens, config.train.overlong
    if tokens <= most:
        return tokens, ""
    longer = f"a row of {tokens:,} tokens is longer than train.max_tokens ({most:,})"
    fate = "stops a run" if overlong == "error" else f"is not trained whole (train.overlong: {overlong})"
    if most == TrainConfig().max_tokens:
        return tokens, f"{longer}, its default, and {fate}: train it with train.max_tokens={tokens}"
    return most, f"{longer} and {fate}: planned for {most:,}"


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a plan needs to know of the data.

    Attributes:
        largest: the longest micro-batch.
        longest: tokens of the longest row.
        sizes: tokens of micro-batches that stand for all of the run; none where the data wasn't read.
        count: micro-batches of the run.
        notes: what the user should know.
    """

    largest: Forest | Row
    longest: int
    sizes: tuple[int, ...] = ()
    count: int = 0
    notes: tuple[str, ...] = ()


def _rows(config: RunConfig, tokens: int | None) -> _Rows:
    if tokens is not None:
        return _Rows(Row(tokens), tokens)
    from longtune.train.prepare import data_sources, load_data

    train, valid = data_sources(config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    if problems := unread_settings(config, valid, tokenizer):
        raise UserError(problems)
    data = load_data(config, train, tokenizer)
    batches = batcher(config, data)
    found = checked_length(config, batches)
    sizes = batches.sizes
    each = tuple(sum(sizes[row] for row in batch) for batch in batches.sample(found.micro_batches))
    notes = (*found.lines(data.shares), *found.not_reached(data.shares))
    return _Rows(_longest(batches, data), data.report.longest, each, found.micro_batches, notes)


def _model(config: RunConfig, dtype: torch.dtype) -> tuple[Any, Ranks]:
    from longtune.train.prepare import planned_ranks

    model: nn.Module | None = None
    if config.quantise_on_load is None:
        model = meta_model(config.model, dtype, trust_remote_code=config.trust_remote_code)
    if model is None:
        model = load_model(
            config.model, dtype=str(dtype).removeprefix("torch."), device="cpu", quantise=config.quantise_on_load
        ).model
    lora = config.lora
    folder = embedded_folder() if config.model == EMBEDDED else Path(config.model).expanduser()
    ranks = planned_ranks(config, cast(PreTrainedModel, model), folder if folder.exists() else None)
    wrapped = add_lora(
        model,  # pyright: ignore[reportArgumentType]
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        layers=lora.layers if isinstance(lora.layers, str) else list(lora.layers),
        dropout=lora.dropout,
        rslora=lora.rslora,
        rank_policy=lora.rank_policy,
        bits=ranks.bits,
        kl=ranks.kl,
    )
    wrapped.train()
    return wrapped, ranks


def _budget_for(config: RunConfig, away: Device | None, here: torch.device, device_memory: str | None) -> Budget:
    asked = memory_bytes(config.memory) if isinstance(config.memory, str) else None
    disk = int(0.9 * shutil.disk_usage(tempfile.gettempdir()).free)
    given = memory_bytes(device_memory) if device_memory is not None else None
    if away is None:
        found = budget_here(here, asked, shutil.disk_usage(tempfile.gettempdir()).free)
        return replace(found, device=min(found.device, given)) if given else found
    room = given or int(0.98 * away.memory) + CONTEXT // 2
    # Of a machine that isn't here, the host is unknown: this one's stands for it.
    host = int(0.9 * devices.host_memory()["total"])
    return Budget(min(room, asked) if asked else room, host, disk)


def _whole_run(planner: Planner, shown: Prediction, shape: Row, rows: _Rows) -> float:
    """Seconds of all micro-batches: linear and quadratic in their tokens, by the longest and a shorter one."""
    long, short = shown.tokens, max(1, shown.tokens // 2)
    there = shown.seconds.total
    half = planner.predict(shown.plan, shape.resized(short)).seconds.total
    square = max(0.0, (there / long - half / short) / (long - short)) if long > short else 0.0
    linear = max(0.0, there / long - square * long)
    sampled = math.fsum(linear * n + square * n * n for n in rows.sizes)
    return sampled * (rows.count / len(rows.sizes)) + shown.seconds.first
