"""Where the figures behind rank policies come from: the modules themselves, and files that lie with the model.

What follows from the figures is decided in `ranks`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from longtune.errors import Problem, UserError
from longtune.model.experts import find_stacks
from longtune.model.names import match_names
from longtune.model.packed.storage import bits_of, is_quantised
from longtune.model.ranks import (
    Ranks,
    choose_ranks,
    find_sensitivities,
    find_widths,
    kind_of,
    read_sensitivities,
    read_widths,
)
from longtune.model.targets import ALL_LINEAR, choose_targets, is_linear


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of a model's linears and stacks of experts, by full name.

    Attributes:
        bits: storage width of those that are quantised.
        kl: sensitivity of those that were measured.
        kl_file: where the sensitivities were read; None without any.
    """

    bits: dict[str, float] = field(default_factory=dict)
    kl: dict[str, float] = field(default_factory=dict)
    kl_file: Path | None = None


def find_figures(
    model: nn.Module,
    folder: str | os.PathLike[str] | None,
    *,
    policy: str = "by_kl",
    sensitivity: str | os.PathLike[str] | None = None,
) -> Figures:
    """The figures that a policy needs.

    A width is the module's own; for weights that were dequantised on loading, what the model's metadata says.

    Args:
        model: without adapters, or with.
        folder: the model's folder or file; None where there is none on this disk.
        policy: `constant` needs no figures, `by_bits` widths alone, `by_kl` both.
        sensitivity: a file of sensitivities, or a folder that holds one; the default is the model's own, if it has one.

    Raises:
        UserError: a file can't be read, is none of sensitivities, or says nothing of this model.
    """
    if policy == "constant":
        return Figures()
    linears = {name.replace(".base_layer", ""): module for name, module in model.named_modules() if is_linear(module)}
    own = Path(folder) if folder is not None else None
    bits = {name: bits_of(module) for name, module in linears.items() if is_quantised(module)}
    if not bits and own is not None and (file := find_widths(own)) is not None:
        bits = _named(read_widths(file), model, linears)
    if policy == "by_bits":
        return Figures(bits)
    file = _sensitivity_file(own, sensitivity)
    if file is None:
        return Figures(bits)
    kl = _named(read_sensitivities(file), model, linears)
    if not kl:
        raise UserError(Problem(str(file), "names no linear of this model", "measure this model: longtune sensitivity"))
    return Figures(bits, kl, file)


def lora_ranks(
    model: PreTrainedModel,
    figures: Figures,
    *,
    rank: int,
    policy: str,
    targets: str | Sequence[str] = ALL_LINEAR,
    layers: str | Sequence[int] = "all",
) -> Ranks:
    """The ranks that `adapters.add_lora` gives with the same settings; nothing is added to the model.

    Raises:
        UserError: as `targets.choose_targets` and `ranks.choose_ranks`; or ranks of which no module can use all.
    """
    ranks = choose_ranks(policy, rank, choose_targets(model, targets, layers), figures.bits, figures.kl)
    return _told_of_limits(ranks, _limits(model, ranks.by_name))


def _limits(model: nn.Module, names: Collection[str]) -> dict[str, int]:
    """The highest rank that an update of each weight can have: the lesser of its inputs and outputs."""
    modules, stacks = dict(model.named_modules()), find_stacks(model)
    limits: dict[str, int] = {}
    for name in names:
        if name in stacks:
            limits[name] = min(stacks[name].shape[1:])
        elif isinstance(module := modules[name], Conv1D):
            limits[name] = min(module.weight.shape)
        else:
            limits[name] = min(int(getattr(module, size)) for size in ("in_features", "out_features"))
    return limits


def _told_of_limits(ranks: Ranks, limits: dict[str, int]) -> Ranks:
    """The ranks with a note of those that are higher than their module can use.

    Raises:
        UserError: all of them are.
    """
    beyond = [name for name, rank in ranks.by_name.items() if rank > limits[name]]
    if not beyond:
        return ranks
    if len(beyond) == len(ranks.by_name):
        most = max(limits.values())
        reason = (
            f"{ranks.base} is more than any module here can use: {most} at most, the lesser of its inputs and outputs"
        )
        raise UserError(Problem("lora.rank", reason, f"set it to {most} or less"))
    kinds = {kind_of(name): limits[name] for name in beyond}
    told = ", ".join(f"{kind} {limit}" for kind, limit in kinds.items())
    note = f"lora.rank {ranks.base} is more than some modules can use, and buys nothing there (most: {told})"
    return replace(ranks, notes=(*ranks.notes, note))


def _sensitivity_file(folder: Path | None, given: str | os.PathLike[str] | None) -> Path | None:
    if given is None:
        return find_sensitivities(folder) if folder is not None and folder.is_dir() else None
    path = Path(given).expanduser()
    if path.is_dir():
        inside = find_sensitivities(path) or path / "sensitivity.json"
        if not inside.is_file():
            fix = "name the file that longtune sensitivity wrote"
            raise UserError(Problem(f"lora.sensitivity: {given}", "this folder holds no sensitivity.json", fix))
        return inside
    if not path.is_file():
        fix = "write it with: longtune sensitivity MODEL --data DATA"
        raise UserError(Problem(f"lora.sensitivity: {given}", "there is no such file", fix))
    return path


def _named(figures: dict[str, float], model: nn.Module, linears: dict[str, nn.Module]) -> dict[str, float]:
    """Figures by this model's names of linears and of stacks of experts.

    MLX keeps gate and up of experts apart, and a stack of both takes the higher figure: its rank serves both.
    """
    stacks = {alias: name for name in find_stacks(model) for alias in _aliases(name)}
    found: dict[str, float] = {}
    for theirs, mine in match_names(figures, [*linears, *stacks]).items():
        name = stacks.get(mine, mine)
        found[name] = max(found.get(name, 0.0), figures[theirs])
    return found


def _aliases(stack: str) -> Iterator[str]:
    """What MLX's files call a stack, or its halves."""
    owner, _, leaf = stack.rpartition(".")
    yield stack
    for module in (f"{owner.rpartition('.')[0]}.switch_mlp", owner):
        for part in ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,):
            yield f"{module}.{part}"
