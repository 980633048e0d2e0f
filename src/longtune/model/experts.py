"""Experts that are stored as one tensor for all, [E, out, in]: which there are, and PEFT's names of their adapters.

PEFT adapts such a tensor by its parameter's name (`target_parameters`). Wrappers of several tensors of one module are
nested, and a wrapper's depth alone says in a file which tensor is meant. What a wrapper computes is in `expert_lora`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

_NEST = ".base_layer"


def find_stacks(model: nn.Module) -> dict[str, torch.Tensor]:
    """Stacks of experts by their full names, in the order of modules and, within one, of its parameters.

    Args:
        model: with adapters or without; names are those of the model without.
    """
    return {name: parameter for name, (_, parameter) in _stacks(model)}


def stack_owners(model: nn.Module) -> list[nn.Module]:
    """The modules that hold stacks."""
    return list(dict.fromkeys(owner for _, (owner, _) in _stacks(model)))


def _stacks(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, torch.Tensor]]]:
    for path, module in model.named_modules():
        experts = getattr(module, "num_experts", None)
        if not isinstance(experts, int) or isinstance(module, BaseTunerLayer):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            wide = parameter.is_floating_point() and parameter.element_size() >= 2
            # One expert alone is no stack to PEFT.
            if parameter.ndim == 3 and wide and experts == parameter.shape[0] > 1:
                yield f"{unwrapped(path)}.{leaf}", (module, parameter)


def unwrapped(name: str) -> str:
    """The name of a module of an adapted model as it is without PEFT's wrappers."""
    return name.removeprefix("base_model.model.").replace(_NEST, "")


def is_transposed(owner: nn.Module) -> bool:
    """Whether a module keeps its stacks as [E, in, out]."""
    return bool(getattr(owner, "is_transposed", False))


def shortest_parameters(model: nn.Module, names: Collection[str]) -> list[str]:
    """`target_parameters` that choose exactly the stacks `names`: their ends from the owner on, else the full names."""
    ends = {".".join(name.split(".")[-2:]) for name in names}
    chosen = {name for name, _ in model.named_parameters() if _is_meant(name, ends)}
    return sorted(ends if chosen == set(names) else names)


def nested_paths(stacks: Iterable[str], chosen: Collection[str]) -> dict[str, str]:
    """The module's path that PEFT gives the adapter of each chosen stack.

    Args:
        stacks: all of the model, in order: the first of a module's is the innermost.
    """
    owners: dict[str, list[str]] = {}
    for name in stacks:
        if name in chosen:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: owner + _NEST * (len(names) - 1 - depth)
        for owner, names in owners.items()
        for depth, name in enumerate(names)
    }


def is_stack_path(config: LoraConfig, path: str) -> bool:
    """Whether a module's path in an adapter's file means a stack: its configuration names it nowhere as a module."""
    if not config.target_parameters:
        return False
    return _NEST in path or not check_target_module_exists(config, path)


def chosen_stacks(config: LoraConfig, stacks: Mapping[str, Any]) -> list[str]:
    """Those of a model's stacks that a configuration means."""
    return [name for name in stacks if _is_meant(name, set(config.target_parameters or ()))]


def _is_meant(name: str, targets: Collection[str]) -> bool:
    return name in targets or any(name.endswith(f".{target}") for target in targets)


def split(down: torch.Tensor, up: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E * rank, in] and B [out, rank * E] as PEFT stores them -> [E, rank, in] and [E, out, rank]."""
    return down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 0, 1)


def joined(down_ERI: torch.Tensor, up_EOR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `split`."""
    return down_ERI.flatten(0, 1), up_EOR.permute(1, 2, 0).flatten(1)
