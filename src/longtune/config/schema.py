"""The one schema of a run: every key of its YAML file, documented under each field.

It says what may be written, key by key. Which values don't go together is said in `refusals`; reading a file and
`key=value` overrides is the work of `reading`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
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
    model_serializer,
)

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


def _text(value: object) -> object:
    """A path that Python code gives counts as its name."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Name = Annotated[str, BeforeValidator(_text)]
"""A path, or a name on the hub."""
Named = Annotated[Name, Field(min_length=1)]
"""One that no run can do without."""


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
    return "file" if isinstance(value, (str, os.PathLike)) else "count" if isinstance(value, int) else "list"


class DataSource(_Section):
    """One of several data sources."""

    path: Named
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
    sensitivity: Name | None = None
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
    max_tokens: Annotated[int, Strict(), Field(ge=2, lt=2**63)] = 131072
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
        | Annotated[Name, Tag("file")]
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
    reference_adapter: Name | None = None
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
    return "name" if isinstance(value, (str, os.PathLike)) else "list"


def _sources(value: object) -> object:
    """One source counts as a list of it."""
    return (value,) if isinstance(value, (Mapping, DataSource)) else value


def _source(value: object) -> object:
    """A name counts as a source of it."""
    if isinstance(value, (str, os.PathLike)):
        return {"path": _text(value)}
    if not isinstance(value, (Mapping, DataSource)):
        raise ValueError("a source is a file, a folder, a hub name, or {path, weight}")
    return value


def _memory_kind(value: object) -> str:
    return "plan" if isinstance(value, (Mapping, MemoryPlan)) else "size"


class RunConfig(_Section):
    """A run."""

    model: Named = "smollm2"
    """smollm2 (the embedded model), a hub name, a folder, or a file.gguf."""
    data: Annotated[
        Annotated[Named, Tag("name")]
        | Annotated[
            tuple[Annotated[DataSource, BeforeValidator(_source)], ...],
            BeforeValidator(_sources),
            Field(min_length=1),
            Tag("list"),
        ],
        Discriminator(_sources_kind),
    ]
    """A folder, a file, a hub name, or a list of these or of {path, weight}."""
    valid: Name | None = None
    """Validation data; the default is the data folder's own valid file, where there is one."""
    method: Literal["sft", "dpo", "orpo", "simpo"] = "sft"
    """sft | dpo | orpo | simpo."""
    output: Name = ""
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
    log: Annotated[tuple[Literal["memory"], ...], BeforeValidator(_listed)] = ()
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
    init_adapter: Name | None = None
    """Start from an adapter's weights."""
    prompt_sharing: Annotated[Literal["tree", "off"], BeforeValidator(_off)] = "tree"
    """Answers to one prompt share its tokens (tree), or each has its own copy (off)."""
    quantise_on_load: Literal["nf4", "int8"] | None = None
    """Store a plain model's weights in 4 or 8 bits while it is loaded (bitsandbytes): nf4 | int8."""
    trust_remote_code: bool = False
    """Run code that comes with a hub model."""

    @property
    def sources(self) -> tuple[str, ...]:
        """What the data is called: its names or paths."""
        return (self.data,) if isinstance(self.data, str) else tuple(source.path for source in self.data)

    def resolved(self) -> Self:
        """The same run with every default that depends on another key written out."""
        train: dict[str, Any] = {}
        if self.train.learning_rate is None:
            train["learning_rate"] = LEARNING_RATES[self.method]
        if self.train.steps is None and self.train.epochs is None:
            train["epochs"] = 1.0
        output = self.output or str(Path("runs") / (Path(self.sources[0]).name.partition(".")[0] or "run"))
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


def describe_keys() -> dict[str, str]:
    """What every key of the schema means, by dotted key."""
    return dict(_keys())


def _keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, description) of every key of the schema."""
    nested: dict[str, type[BaseModel]] = {"memory": MemoryPlan, "data": DataSource}
    for field_name, field in model.model_fields.items():
        key = prefix + (field.alias or field_name)
        yield key, field.description or ""
        inner = nested.get(key, field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _keys(inner, f"{key}.")
