"""The one schema of a run: every key of its YAML file, documented under each field.

The schema says what may be written; `load_config` reads a file and `key=value` overrides against it and reports
all problems at once. What a value leads to (a plan, an optimiser, a batch) is decided by the rooms that use it;
this module imports none of them and stays cheap to import.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    Tag,
    ValidationError,
    model_serializer,
    model_validator,
)

from longtune.errors import Problem, UserError, counted

LEARNING_RATES = {"sft": 2e-4, "dpo": 5e-5, "orpo": 1e-5, "simpo": 1e-5}
"""Learning rate of each method where the run names none."""

Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Positive = Annotated[int, Strict(), Field(ge=1, lt=2**63)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )


def _seconds(value: object) -> object:
    """'3h', '90m', '1h30m', '2d', '0.5h', or a number of seconds."""
    if not isinstance(value, str) or re.fullmatch(r"[\d.]+(e[+-]?\d+)?", value):
        return value
    parts = [rf"(?:(\d+(?:\.\d+)?)\s*{unit})?" for unit in "dhms"]
    match = re.fullmatch(r"\s*".join(parts), value.strip())
    if not match or not value.strip():
        raise ValueError("a duration is written like 3h, 90m, 1h30m or 45s")
    return sum(float(part or 0) * unit for part, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True))


def _listed(value: object) -> object:
    """One name counts as a list of it."""
    return (value,) if isinstance(value, str) else value


def _prompts_kind(value: object) -> str:
    return "file" if isinstance(value, str) else "count" if isinstance(value, int) else "list"


class DataSource(_Section):
    """One of several data sources."""

    path: str
    """A file, a folder or a hub name."""
    weight: float = Field(default=1.0, gt=0.0)
    """How often each of its rows is seen in an epoch; a fraction takes that share of them, another one each epoch."""


class LoraConfig(_Section):
    """The adapter."""

    rank: Positive = 16
    """Rank of every adapted module."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The update is scaled by alpha / rank (alpha / sqrt(rank) with rslora)."""
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear (every linear inside the layers), or name suffixes or regular expressions; `experts` means those that
    are stored as one tensor, which all-linear leaves out."""
    layers: Annotated[str, Field(pattern=r"^(all|last [1-9]\d*)$")] | tuple[Count, ...] = "all"
    """all, "last N", or a list of layer numbers."""
    rank_policy: Literal["constant", "by_bits", "by_kl"] = "constant"
    """How a module's rank follows from `rank`: constant | by_bits (its storage width) | by_kl (its sensitivity)."""
    sensitivity: str | None = None
    """For by_kl: a file that `longtune sensitivity` wrote; the default is the one in the model's folder."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    lora_plus_ratio: float = Field(default=1.0, ge=1.0)
    """Learning rate of every B matrix, as a multiple of that of A (LoRA+)."""


class TrainConfig(_Section):
    """The optimiser's walk over the data."""

    steps: Positive | None = None
    """Optimiser steps. Give this or `epochs`."""
    epochs: float | None = Field(default=None, gt=0.0)
    """Passes over the data; 1 if neither is given."""
    learning_rate: float | None = Field(default=None, gt=0.0)
    """Highest learning rate; the default follows from the method."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """After warm-up: constant; linear to zero; cosine to a tenth of the learning rate."""
    warmup_ratio: Fraction = 0.03
    """Share of the steps in which the learning rate rises from zero."""
    warmup_steps: Count | None = None
    """The same as a number of steps; wins over `warmup_ratio`."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's two averages."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to AdamW's denominator."""
    batch_size: Positive = 1
    """Rows of a micro-batch, laid end to end without padding."""
    tokens_per_batch: Positive | None = None
    """Fill a micro-batch up to so many tokens instead of `batch_size` rows."""
    accumulate: Positive = 8
    """Micro-batches of an optimiser step; more of them cost time, not memory."""
    max_tokens: Annotated[int, Field(ge=2)] = 131072
    """Longest row in tokens."""
    overlong: Literal["error", "drop", "truncate_left", "truncate_right", "split"] = "error"
    """What happens to longer rows: error | drop | truncate_left | truncate_right | split."""
    loss_normalisation: Literal["token", "sequence"] = "token"
    """Mean over all trained tokens of a step, or over its rows' token means."""
    seed: Count = 0
    """Seed of adapter, data order and dropout."""
    clip_norm: float = Field(default=1.0, ge=0.0)
    """Gradients are clipped to this global L2 norm; 0 is off."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or norm that is not finite stops the run, or skips the step with a warning."""
    eval_every: Count = 50
    """Validate every so many steps and at the end; 0 is never."""
    eval_rows: Positive = 256
    """Most rows of a validation: always the same ones."""
    save_every: Count = 50
    """Save a checkpoint every so many steps; 0 is never."""
    keep: Annotated[str, Field(pattern=r"^(all|best( loss| margin| accuracy)?|last [1-9]\d*)$")] = "all"
    """Checkpoints that stay: all, "last N", or best (by loss, or best margin, best accuracy) and the newest."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """A checkpoint or log line that can't be written (disk full) stops the run, or it goes on and tries again later."""
    stop_after: Annotated[float, BeforeValidator(_seconds), Field(gt=0.0)] | None = None
    """Save and leave after so much time: 3h, 90m, or seconds."""


class SamplesConfig(_Section):
    """Answers that are generated at every validation, before the first step and after the last."""

    prompts: Annotated[
        Annotated[Count, Tag("count")]
        | Annotated[str, Tag("file")]
        | Annotated[tuple[str, ...], Field(min_length=1), Tag("list")],
        Discriminator(_prompts_kind),
    ] = 0
    """So many held-out prompts of the validation rows, a list of prompts, or a text file with one a line; 0 is off."""
    max_new_tokens: Positive = 64
    """Longest answer in tokens."""
    max_prompt_tokens: Positive = 2048
    """Validation rows whose prompt is longer are passed over."""


class MemoryPlan(_Section):
    """How a step walks the grid of layers and chunks, set by hand. Keys that are left out are chosen by the planner."""

    chunk_tokens: Positive | None = None
    """Tokens of a chunk; null is the whole row."""
    layers_per_segment: Positive | None = 1
    """Layers between two kept boundaries; null is all."""
    boundary_store: Literal["device", "host", "disk"] = "device"
    """Where boundaries wait for the backward."""
    head_chunk: Positive | None = 1024
    """Targets of which the loss head makes logits at once; null is all."""
    keep: Literal["nothing", "kv", "attention", "everything"] = "nothing"
    """What the forward keeps so that the backward need not recompute it."""
    keep_layers: Positive | None = None
    """The last layers to which keep applies; null is all."""
    keep_below: Literal["nothing", "kv", "attention"] = "nothing"
    """What the layers below those keep."""
    halves: bool = False
    """Run a cell's backward in two parts: less is alive at once, queries, keys and values are computed again."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> MemoryPlan:
        given = self.model_fields_set
        if {"keep", "keep_below"} <= given and self.keep in ("nothing", "kv") and self.keep_layers is None:
            raise ValueError("keep_below is for the layers below keep_layers, which is not given")
        return self

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A key that was left out stays left out: it is not the same as its default."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class DpoConfig(_Section):
    """Settings of method dpo."""

    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the preference."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Form of the loss."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of pairs assumed to be labelled the wrong way round."""
    reference: Literal["cached", "online"] = "cached"
    """Reference log-probs are computed once and cached, or at every step."""
    reference_adapter: str | None = None
    """A frozen adapter as the reference; null is the base model."""


class OrpoConfig(_Section):
    """Settings of method orpo."""

    lambda_: float = Field(default=0.1, ge=0.0, alias="lambda")
    """Weight of the odds term."""
    sft_scope: Literal["full", "response"] = "full"
    """What the likelihood term covers: the whole chosen sequence, or its answer."""


class SimpoConfig(_Section):
    """Settings of method simpo."""

    beta: float = Field(default=2.0, gt=0.0)
    """Strength of the preference, on average log-probs."""
    gamma: float = Field(default=1.0, ge=0.0)
    """Target margin between the answers, in the units of beta times log-prob."""


def _off(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


def _sources_kind(value: object) -> str:
    return "name" if isinstance(value, str) else "list"


def _memory_kind(value: object) -> str:
    return "plan" if isinstance(value, (Mapping, MemoryPlan)) else "size"


class RunConfig(_Section):
    """A run."""

    model: str = "smollm2"
    """smollm2 (the embedded model), a hub name, a folder, or a file.gguf."""
    data: Annotated[
        Annotated[str, Tag("name")] | Annotated[tuple[DataSource, ...], Field(min_length=1), Tag("list")],
        Discriminator(_sources_kind),
    ]
    """A folder, a file, a hub name, or a list of {path, weight}."""
    valid: str | None = None
    """Validation data; the default is the data folder's own valid file, where there is one."""
    method: Literal["sft", "dpo", "orpo", "simpo"] = "sft"
    """sft | dpo | orpo | simpo."""
    output: str = ""
    """The run's folder; the default is runs/ and the data's name."""
    columns: dict[str, str] = {}
    """Renames columns of the data: {theirs: ours}."""
    answer_after: str | None = None
    """For text rows: train only what follows the first place of this string ("\\nA: "); null trains all of it."""
    train_on: Literal["assistant", "last", "all", "completion"] = "assistant"
    """Which tokens of a conversation are trained: assistant | last | all | completion."""
    bad_rows: Literal["error", "drop"] = "error"
    """Rows that can't be used stop the run before it starts, or are left out and counted: error | drop."""
    token_cache: bool = True
    """Keep the data's tokens on disk, mapped, where the next run finds them; false holds them in memory."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the tokenizer's chat template."""
    lora: LoraConfig = LoraConfig()
    """The adapter."""
    train: TrainConfig = TrainConfig()
    """The optimiser's walk over the data."""
    samples: SamplesConfig = SamplesConfig()
    """Answers to a few prompts, generated as training goes."""
    track: Annotated[tuple[Tracker, ...], BeforeValidator(_listed)] = ()
    """Trackers that get the run's events: any of [tensorboard, trackio, wandb, mlflow]."""
    memory: Annotated[
        Annotated[str, Field(pattern=r"^(auto|\d+(\.\d+)?\s*[KMGT]i?B)$"), Tag("size")]
        | Annotated[MemoryPlan, Tag("plan")],
        Discriminator(_memory_kind),
    ] = "auto"
    """auto (what is free), a budget (24GB), or keys of the plan: {chunk_tokens, layers_per_segment, ...}."""
    log: tuple[Literal["memory"], ...] = ()
    """More events in metrics.jsonl: memory (after each phase of a step)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto | float32 | bfloat16 | float16."""
    compile: Literal["auto"] | bool = "auto"
    """Layers through torch.compile: true, false, or auto (on CUDA, where the run is long enough to pay for
    compiling)."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dpo: DpoConfig = DpoConfig()
    """Settings of method dpo."""
    orpo: OrpoConfig = Field(default_factory=lambda: OrpoConfig.model_validate({}))
    """Settings of method orpo."""
    simpo: SimpoConfig = SimpoConfig()
    """Settings of method simpo."""
    init_adapter: str | None = None
    """Start from an adapter's weights."""
    prompt_sharing: Annotated[Literal["tree", "off"], BeforeValidator(_off)] = "tree"
    """Answers to one prompt share its tokens (tree), or each has its own copy (off)."""
    quantise_on_load: Literal["nf4", "int8"] | None = None
    """Store a plain model's weights in 4 or 8 bits while it is loaded (bitsandbytes): nf4 | int8."""
    trust_remote_code: bool = False
    """Run code that comes with a hub model."""

    def resolved(self) -> Self:
        """The same run with every default that depends on another key written out."""
        train: dict[str, Any] = {}
        if self.train.learning_rate is None:
            train["learning_rate"] = LEARNING_RATES[self.method]
        if self.train.steps is None and self.train.epochs is None:
            train["epochs"] = 1.0
        output = self.output
        if not output:
            first = self.data if isinstance(self.data, str) else self.data[0].path
            output = str(Path("runs") / (Path(first).name.partition(".")[0] or "run"))
        return self.model_copy(update={"train": self.train.model_copy(update=train), "output": output})

    def anchored(self) -> Self:
        """The same run with absolute paths wherever a key names something on this disk."""

        def absolute(name: str | None) -> str | None:
            return str(Path(name).absolute()) if name and Path(name).exists() else name

        data = self.data
        if not isinstance(data, str):
            data = tuple(source.model_copy(update={"path": absolute(source.path)}) for source in data)
        prompts = self.samples.prompts
        if isinstance(prompts, str):
            prompts = absolute(prompts)
        return self.model_copy(
            update={
                "model": absolute(self.model) if self.model != "smollm2" else self.model,
                "data": absolute(data) if isinstance(data, str) else data,
                "valid": absolute(self.valid),
                "output": str(Path(self.output).absolute()),
                "init_adapter": absolute(self.init_adapter),
                "lora": self.lora.model_copy(update={"sensitivity": absolute(self.lora.sensitivity)}),
                "samples": self.samples.model_copy(update={"prompts": prompts}),
                "dpo": self.dpo.model_copy(update={"reference_adapter": absolute(self.dpo.reference_adapter)}),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, by the names of the YAML file."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """YAML that `load_config` reads back to the same config."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @property
    def digest(self) -> str:
        """A fingerprint of all keys but `output`."""
        values = self.to_dict() | {"output": ""}
        return hashlib.sha256(yaml.safe_dump(values, sort_keys=True).encode()).hexdigest()[:16]


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """A run from a YAML file, overrides of the form `key=value` (dotted keys, YAML values), or both.

    A run folder counts as its `config.yaml`, with `output` naming the folder itself.

    Raises:
        UserError: with every problem of the file and the overrides.
    """
    name = "config"
    values: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if file.is_dir():
            if not (file / "config.yaml").is_file():
                raise UserError(Problem(str(path), "this folder holds no config.yaml", "name a config file or a run"))
            overrides = [f"output={quoted(str(path))}", *overrides]
            file = file / "config.yaml"
        name = str(file)
        values = _read_yaml(file)
    set_keys = _apply(values, overrides)
    _give_way(values, set_keys)
    try:
        config = RunConfig.model_validate(values).resolved()
    except ValidationError as error:
        raise UserError(_problems(error, values, name, set_keys)) from None
    refused = [Problem(_place(key, name, set_keys), why, fix) for key, why, fix in _refusals(config)]
    if refused:
        raise UserError(refused)
    return config


def check_config(config: RunConfig) -> RunConfig:
    """The resolved config of a run that was made in Python; raises UserError for what is not supported."""
    config = config.resolved()
    refused = [Problem(f"config: {key}", why, fix) for key, why, fix in _refusals(config)]
    if refused:
        raise UserError(refused)
    return config


def describe_keys() -> dict[str, str]:
    """What every key of the schema means, by dotted key."""
    return dict(_sections())


def supported_methods() -> tuple[str, ...]:
    """The methods that `longtune.objective` has an objective for."""
    try:
        return tuple(importlib.import_module("longtune.objective").OBJECTIVES)
    except (ImportError, AttributeError):
        return ("sft",)


def _refusals(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(key, reason, fix) of every value that the schema allows and this version can't honour."""
    train = config.train
    methods = supported_methods()
    if config.method not in methods:
        yield "method", f"{config.method} is not supported yet", f"use {' or '.join(methods)}"
    if config.lora.sensitivity is not None and config.lora.rank_policy != "by_kl":
        why = f"has no meaning under rank_policy {config.lora.rank_policy}"
        yield "lora.sensitivity", why, "leave it out, or use rank_policy by_kl"
    if config.dpo.label_smoothing and config.dpo.loss in ("hinge", "ipo"):
        yield "dpo.label_smoothing", f"has no meaning under loss {config.dpo.loss}", "leave it out, or use sigmoid"
    if config.method != "sft" and train.loss_normalisation != "token":
        why = f"has no meaning under {config.method}, whose loss is a mean over pairs"
        yield "train.loss_normalisation", why, "leave it out"
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


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(Problem(str(file), "no such file", "write one with: longtune init DATA")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(str(file), f"can't be read: {error}")) from None
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        fix = f"is it data? longtune train --data {file}" if file.suffix not in (".yaml", ".yml") else ""
        raise UserError(Problem(place, f"not valid YAML: {getattr(error, 'problem', None) or error}", fix)) from None
    if not isinstance(values, dict):
        raise UserError(Problem(str(file), "holds no keys", "write one with: longtune init DATA"))
    return values


def quoted(text: str) -> str:
    """A text as a YAML value, so that an override takes it as it is."""
    return yaml.safe_dump(text, default_style='"', width=float("inf")).strip()


_EITHER = (("train", "steps", "epochs"), ("train", "tokens_per_batch", "batch_size"))
"""Keys of which a run has one: an override of one takes the place of the other in the file."""


def _give_way(values: dict[str, Any], set_keys: set[str]) -> None:
    """Take out of `values` what an override stands instead of."""
    for section, one, other in _EITHER:
        inner = values.get(section)
        for given, replaced in ((one, other), (other, one)):
            overridden = f"{section}.{given}" in set_keys and f"{section}.{replaced}" not in set_keys
            if overridden and isinstance(inner, dict) and inner.get(given) is not None:
                inner.pop(replaced, None)


def _apply(values: dict[str, Any], overrides: Sequence[str]) -> set[str]:
    """Writes the overrides into `values`; returns their dotted keys."""
    keys: set[str] = set()
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(Problem(f"--set {override}", "is not of the form key=value", "--set train.steps=100"))
            continue
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError:
            problems.append(Problem(f"--set {override}", "the value is not valid YAML", "put it in quotes"))
            continue
        *sections, last = key.split(".")
        inner = values
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[last] = value
        keys.add(key)
    if problems:
        raise UserError(problems)
    return keys


def _place(key: str, name: str, set_keys: set[str]) -> str:
    is_set = any(key == set_key or key.startswith(f"{set_key}.") for set_key in set_keys)
    return f"--set {key}" if is_set else f"{name}: {key}"


def _problems(error: ValidationError, values: dict[str, Any], name: str, set_keys: set[str]) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        key = _key(item["loc"], values)
        kind, given = item["type"], item["input"]
        fix = ""
        if kind == "extra_forbidden":
            nearest = _nearest(key)
            reason = "unknown key"
            fix = f"did you mean {' or '.join(nearest)}?" if nearest else "remove it"
        elif kind == "missing":
            reason = "is missing"
        elif kind == "literal_error":
            reason = f"must be {item.get('ctx', {}).get('expected', '')}, not {given!r}"
        elif kind == "string_pattern_mismatch":
            reason = f"{given!r} is not one of the forms it may have"
            fix = describe_keys().get(key, "")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            reason = f"{message[0].lower()}{message[1:]}" + ("" if isinstance(given, dict) else f", not {given!r}")
        # A value that fits no branch of a union is reported once for each branch: the first says enough.
        problems.setdefault(key, Problem(_place(key, name, set_keys), reason, fix))
    return [problem for key, problem in problems.items() if not any(other.startswith(f"{key}.") for other in problems)]


def _key(loc: tuple[int | str, ...], values: object) -> str:
    """The dotted key of an error, without the names of union branches that pydantic puts into its location."""
    parts: list[str] = []
    inner: Any = values
    for index, part in enumerate(loc):
        try:
            inner = inner[part]
        except (KeyError, IndexError, TypeError):
            if not (index == len(loc) - 1 and isinstance(inner, dict)):
                continue
        parts.append(str(part))
    return ".".join(parts)


def _sections(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, description) of every key of the schema."""
    nested: dict[str, type[BaseModel]] = {"memory": MemoryPlan, "data": DataSource}
    for field_name, field in model.model_fields.items():
        key = prefix + (field.alias or field_name)
        yield key, field.description or ""
        inner = nested.get(key, field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _sections(inner, f"{key}.")


def _nearest(key: str) -> list[str]:
    """Known keys that a mistyped or misplaced one may have meant, the likeliest first."""
    key = re.sub(r"\.\d+\.", ".", key)
    known = [name for name, _ in _sections()]
    section, _, last = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, siblings, n=3, cutoff=0.6)
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    near += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=2, cutoff=0.8)]
    return list(dict.fromkeys(near))[:3]
