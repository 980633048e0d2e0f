"""Adapters on disk, in PEFT's layout or mlx-lm's, read into one form: what each module's output is increased by.

Finding and reading alone: putting adapters on models is the work of `adapters`, writing other layouts that of `export`.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import nn

from longtune.errors import Problem, UserError
from longtune.model.experts import (
    chosen_stacks,
    find_stacks,
    is_stack_path,
    is_transposed,
    nested_paths,
    split,
    unwrapped,
)
from longtune.model.names import match_names

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
"""The two files of a saved PEFT adapter."""

MLX_WEIGHTS = "adapters.safetensors"
"""The weights of mlx-lm's layout, beside an adapter_config.json of its own."""

PREFIX = "base_model.model."
"""What PEFT puts before the model's own names."""

Layout = Literal["peft", "mlx"]


@dataclass(frozen=True, slots=True)
class Update:
    """y += scale * x A^T B^T of one linear, or of each expert of a stack.

    Attributes:
        down_RI: A [rank, in]; of a stack [E, rank, in].
        up_OR: B [out, rank]; of a stack [E, out, rank].
    """

    down_RI: torch.Tensor
    up_OR: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down_RI.shape[-2]

    @property
    def stacked(self) -> bool:
        return self.down_RI.ndim == 3

    def delta(self) -> torch.Tensor:
        """scale * B A in fp32 [out, in]; of a stack [E, out, in]."""
        return self.scale * (self.up_OR.float() @ self.down_RI.float())


@dataclass(frozen=True, slots=True)
class Updates:
    """A whole adapter.

    Attributes:
        folder: where it was read.
        layout: how it lay there.
        by_name: update of each module, by the names of the file.
        base_model: the model that it names as its base, if it does.
        rslora: its scales are alpha / sqrt(rank).
        stacks: A and B for stacks of experts by the paths of the file; which tensor is meant, the model tells
            (`named_for`).
        config: of PEFT's layout.
    """

    folder: Path
    layout: Layout
    by_name: dict[str, Update]
    base_model: str | None = None
    rslora: bool = False
    stacks: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    config: LoraConfig | None = None

    @property
    def ranks(self) -> dict[str, int]:
        return {name: update.rank for name, update in self.by_name.items()}


def find_adapter(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, or the adapter of a run folder; checked to hold a configuration and safetensors weights."""
    path = _find(folder)
    if not (path / WEIGHTS).is_file():
        place = f"adapter: {folder}"
        if (path / MLX_WEIGHTS).is_file():
            fix = f"longtune export {folder} --out NEW, which writes PEFT's; or start from it with init_adapter"
            raise UserError(Problem(place, "is in mlx-lm's layout", fix))
        raise UserError(Problem(place, f"holds no {WEIGHTS}"))
    return path


def find_any_adapter(folder: str | os.PathLike[str]) -> tuple[Path, Layout]:
    """As `find_adapter`, of either layout."""
    path = _find(folder)
    if (path / WEIGHTS).is_file():
        return path, "peft"
    if (path / MLX_WEIGHTS).is_file():
        return path, "mlx"
    raise UserError(Problem(f"adapter: {folder}", f"holds neither {WEIGHTS} nor {MLX_WEIGHTS}"))


def _find(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file() and (path / "adapter" / CONFIG).is_file():
        path = path / "adapter"
    place = f"adapter: {folder}"
    if not path.is_dir():
        raise UserError(Problem(place, "there is no such folder", "name the folder that holds adapter_config.json"))
    if not (path / CONFIG).is_file():
        if saved := _checkpoints(path):
            fix = f"name one of its checkpoints: {' or '.join(saved)}"
            raise UserError(Problem(place, "is a run that isn't finished: it has no adapter yet", fix))
        raise UserError(Problem(place, f"holds no {CONFIG}", "name an adapter's folder, or a run's"))
    if not any((path / name).is_file() for name in (WEIGHTS, MLX_WEIGHTS)) and (path / "adapter_model.bin").is_file():
        reason = "holds pickled weights, which can run code when they are read"
        raise UserError(Problem(place, reason, f"save it again with peft, as {WEIGHTS}"))
    return path


def _checkpoints(run: Path, most: int = 3) -> list[str]:
    """Adapters that a run folder holds in its checkpoints, the newest ones, the last first."""
    newest = sorted(run.glob(f"checkpoints/*/{CONFIG}"), key=lambda file: (file.stat().st_mtime, file), reverse=True)
    return [str(file.parent) for file in newest[:most]]


def read_config(path: Path) -> LoraConfig:
    place = str(path / CONFIG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keys of a newer PEFT are said to be ignored; the weights decide.
            config = PeftConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(Problem(place, f"can't be read ({error})")) from error
    if not isinstance(config, LoraConfig):
        raise UserError(Problem(place, f"is a {config.peft_type} adapter, not LoRA"))
    if problems := [Problem(place, f"{key} {reason}") for key, reason in _faults(config)]:
        raise UserError(problems)
    return config


def _faults(config: LoraConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) of what targets, ranks and scales are read from; PEFT takes any value."""
    for key in ("target_modules", "target_parameters"):
        value = getattr(config, key, None)
        listed = isinstance(value, list | set | tuple) and all(isinstance(name, str) for name in value)
        if not (value is None or listed or (key == "target_modules" and isinstance(value, str))):
            yield key, f"is {value!r}, not names"
    counts = lambda value: type(value) is int and value > 0  # noqa: E731
    numbers = lambda value: type(value) in (int, float) and math.isfinite(value)  # noqa: E731
    for key, whole, fits, kind in (
        ("r", "rank_pattern", counts, "a count of at least 1"),
        ("lora_alpha", "alpha_pattern", numbers, "a number"),
    ):
        patterns = getattr(config, whole) or {}
        if not isinstance(patterns, dict):
            yield whole, f"is {patterns!r}, no mapping"
            patterns = {}
        for name, value in {None: getattr(config, key), **patterns}.items():
            if not fits(value):
                yield (key if name is None else f"{whole}: {name}"), f"is {value!r}, not {kind}"
            try:
                re.compile(name or "")
            except re.error as error:
                yield f"{whole}: {name}", f"is no pattern ({error})"


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a PEFT adapter, by their names in the file; they must be of floating dtypes."""
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
            whole = [name for name, each in slices.items() if "F" not in str(each.get_dtype())]
    except (SafetensorError, OSError) as error:
        raise UserError(Problem(str(path / WEIGHTS), f"can't be read ({error})", "save or copy it again")) from error
    if whole:
        raise UserError([Problem(f"{path / WEIGHTS}: {name}", "holds no floating numbers") for name in whole[:10]])
    return shapes


def scale_of(config: LoraConfig, name: str) -> float:
    """What PEFT scales a module's B A by.

    Args:
        name: of the module, without PEFT's prefix.
    """
    alpha_pattern = config.alpha_pattern or {}
    alpha = alpha_pattern.get(get_pattern_key(list(alpha_pattern), name), config.lora_alpha)
    rank = rank_of(config, name)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def rank_of(config: LoraConfig, name: str) -> int:
    """The rank that PEFT gives a module."""
    rank_pattern = config.rank_pattern or {}
    return rank_pattern.get(get_pattern_key(list(rank_pattern), name), config.r)


def read_updates(folder: str | os.PathLike[str]) -> Updates:
    """An adapter's tensors and scales, from either layout.

    Raises:
        UserError: no whole LoRA adapter lies there, or it holds more than A and B of linears (all of it is named).
    """
    path, layout = find_any_adapter(folder)
    return _read_peft(path) if layout == "peft" else _read_mlx(path)


def _read_peft(path: Path) -> Updates:
    config = read_config(path)
    problems = [
        Problem(str(path / CONFIG), f"uses {what}, which only peft itself computes", "merge it with peft")
        for what, used in (
            ("DoRA", config.use_dora),
            ("biases", config.bias != "none" or config.lora_bias),
            ("whole modules (modules_to_save)", bool(config.modules_to_save)),
            ("trainable tokens", bool(config.trainable_token_indices)),
        )
        if used
    ]
    if problems:
        raise UserError(problems)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    strange: list[str] = []
    for key, tensor in _load(path / WEIGHTS).items():
        name, _, kind = key.removeprefix(PREFIX).partition(".lora_")
        if kind in ("A.weight", "B.weight") and tensor.ndim == 2:
            halves.setdefault(name, {})[kind[0]] = tensor
        else:
            strange.append(key)
    pairs = _pairs(path / WEIGHTS, halves, strange, "A", "B")
    by_name = {}
    wrong = []
    stacks = {path: pair for path, pair in pairs.items() if is_stack_path(config, path)}
    for name, (down, up) in pairs.items():
        if name in stacks:
            continue
        expected = rank_of(config, name)
        if down.shape[0] != expected:
            wrong.append(Problem(f"{path}: {name}", f"has rank {down.shape[0]}, and {CONFIG} says {expected}"))
        by_name[name] = Update(down, up, scale_of(config, name))
    if wrong:
        raise UserError(wrong[:10])
    _check_numbers(path, by_name | {name: Update(down, up, 1.0) for name, (down, up) in stacks.items()})
    base = config.base_model_name_or_path or None
    return Updates(path, "peft", by_name, base, bool(config.use_rslora), stacks, config)


def _read_mlx(path: Path) -> Updates:
    place = str(path / CONFIG)
    try:
        config: dict[str, Any] = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        kind = config.get("fine_tune_type", "lora")
        scale = None if kind != "lora" else float(config["lora_parameters"]["scale"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"holds no lora_parameters of mlx-lm ({type(error).__name__}: {error})"
        raise UserError(Problem(place, reason)) from None
    if scale is None:
        raise UserError(Problem(place, f"is of fine_tune_type {kind}, not lora", "fuse it with mlx_lm.fuse"))
    halves: dict[str, dict[str, torch.Tensor]] = {}
    strange: list[str] = []
    for key, tensor in _load(path / MLX_WEIGHTS).items():
        name, _, kind = key.rpartition(".")
        if kind in ("lora_a", "lora_b") and tensor.ndim == 2:
            halves.setdefault(name, {})[kind] = tensor.t()
        else:
            strange.append(key)
    pairs = _pairs(path / MLX_WEIGHTS, halves, strange, "lora_a", "lora_b")
    by_name = {name: Update(down, up, scale) for name, (down, up) in pairs.items()}
    _check_numbers(path, by_name)
    model = config.get("model")
    return Updates(path, "mlx", by_name, model if isinstance(model, str) else None)


def _check_numbers(path: Path, by_name: dict[str, Update]) -> None:
    odd = [n for n, u in by_name.items() if not all(bool(x.float().isfinite().all()) for x in (u.down_RI, u.up_OR))]
    if odd:
        reason = f"holds values that are not finite, as {len(odd)} of {len(by_name)} modules do"
        raise UserError(Problem(f"{path}: {odd[0]}", reason, "use an earlier checkpoint"))
    wrong = {name: update.scale for name, update in by_name.items() if not 0 < abs(update.scale) < math.inf}
    if wrong:
        name, scale = next(iter(wrong.items()))
        raise UserError(Problem(f"{path}: {name}", f"has a scale of {scale}, with which an adapter does nothing"))


def _pairs(
    file: Path, halves: dict[str, dict[str, torch.Tensor]], strange: list[str], down: str, up: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of every module; raises UserError naming whatever is no such pair."""
    problems = [Problem(f"{file}: {key}", "is neither A nor B of a linear") for key in sorted(strange)]
    for name, found in halves.items():
        if found.keys() != {down, up}:
            problems.append(Problem(f"{file}: {name}", f"has no {({down, up} - found.keys()).pop()}"))
        elif found[down].shape[0] != found[up].shape[1]:
            shapes = f"{list(found[down].shape)} and {list(found[up].shape)}"
            problems.append(Problem(f"{file}: {name}", f"A and B are {shapes}, of two ranks"))
    if not halves and not strange:
        problems.append(Problem(str(file), "holds no tensors"))
    if problems:
        more = [Problem(str(file), f"and {len(problems) - 10} more")] if len(problems) > 10 else []
        raise UserError([*problems[:10], *more])
    return {name: (found[down], found[up]) for name, found in halves.items()}


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except (SafetensorError, OSError) as error:
        raise UserError(Problem(str(file), f"can't be read ({error})", "save or copy it again")) from error
    if whole := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise UserError([Problem(f"{file}: {name}", "holds no floating numbers") for name in whole[:10]])
    return tensors


def named_for(updates: Updates, model: nn.Module) -> dict[str, Update]:
    """The updates by the model's own names, each found to fit its module or its stack of experts.

    Raises:
        UserError: every update that has no linear or stack here, or one of other sizes.
    """
    modules = dict(model.named_modules())
    linears = [name for name, module in modules.items() if hasattr(module, "in_features") or hasattr(module, "nf")]
    matched = match_names(updates.by_name, linears)
    problems: list[Problem] = []
    for name, update in updates.by_name.items():
        if name not in matched:
            problems.append(Problem(name, "the adapter has it, the model has not"))
            continue
        sizes = linear_sizes(modules[matched[name]])
        for side, found, size in (("A", update.down_RI, sizes[0]), ("B", update.up_OR, sizes[1])):
            if found.shape[1 if side == "A" else 0] != size:
                shape = list(found.shape)
                problems.append(Problem(name, f"lora_{side} is {shape} in the adapter; the model's side is {size}"))
    stacked = stacked_for(updates, model, problems)
    if problems:
        more = [Problem(str(updates.folder), f"and {len(problems) - 10} more")] if len(problems) > 10 else []
        raise UserError([Problem(str(updates.folder), "was made for another model"), *problems[:10], *more])
    return {matched[name]: update for name, update in updates.by_name.items()} | stacked


def stacked_for(updates: Updates, model: nn.Module, problems: list[Problem]) -> dict[str, Update]:
    """The updates of stacks of experts by the model's own names; what doesn't fit is added to `problems`."""
    if not updates.stacks:
        return {}
    assert updates.config is not None
    stacks = find_stacks(model)
    owners = {name.rpartition(".")[0] for name in stacks}
    transposed = {unwrapped(path): is_transposed(module) for path, module in model.named_modules()}
    matched = match_names({unwrapped(path) for path in updates.stacks}, owners)
    theirs = {
        f"{path}.{name.rpartition('.')[2]}": name
        for path, owner in matched.items()
        for name in stacks
        if name.rpartition(".")[0] == owner
    }
    meant = chosen_stacks(updates.config, theirs)
    paths = {path: name for name, path in nested_paths(theirs, meant).items()}
    found: dict[str, Update] = {}
    for path, (down, up) in updates.stacks.items():
        if path not in paths:
            reason = "the adapter has it for experts, and the model has no such stack of them"
            problems.append(Problem(path, reason))
            continue
        name = theirs[paths[path]]
        rank, scale = rank_of(updates.config, paths[path]), scale_of(updates.config, paths[path])
        experts, out, into = stacks[name].shape
        if transposed[name.rpartition(".")[0]]:
            out, into = into, out
        wanted = ([experts * rank, into], [out, rank * experts])
        if [list(down.shape), list(up.shape)] != list(wanted):
            reason = f"A and B are {list(down.shape)} and {list(up.shape)} in the adapter, and not {wanted[0]} and "
            problems.append(Problem(name, f"{reason}{wanted[1]} ({experts} experts, rank {rank})"))
            continue
        found[name] = Update(*split(down, up, experts), scale)
    problems.extend(
        Problem(name, "is among the adapter's target_parameters, but has no tensors in it")
        for name in meant
        if name not in {paths[path] for path in updates.stacks if path in paths}
    )
    return found


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear of any kind; transformers' Conv1D names them otherwise."""
    if hasattr(module, "in_features"):
        return int(module.in_features), int(module.out_features)  # pyright: ignore[reportArgumentType]
    return int(module.nx), int(module.nf)  # pyright: ignore[reportArgumentType]
