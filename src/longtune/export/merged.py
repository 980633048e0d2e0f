"""A whole model with the adapter in its weights: W + s B A in fp32 on the dequantised base, then cast, as safetensors.

The dense model is filled module by module, and the base gives up each weight when it is taken: only one module is
in fp32 at a time. Putting merged weights into MLX's layout is the work of `mlx_merged`.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from longtune.errors import Problem, UserError
from longtune.export.combine import Named
from longtune.model.adapter_files import Update
from longtune.model.experts import is_transposed
from longtune.model.packed.storage import dequantise, is_quantised

SHARD = "5GB"
"""Largest file of weights."""


def write(
    folder: Path,
    model: PreTrainedModel,
    updates: Named,
    *,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the merged model with its configuration, and its tokenizer.

    Args:
        model: the base, quantised or not. Its weights are gone afterwards.
        dtype: of the written weights.
    """
    check_mergeable(model, updates)
    merged = merge(model, updates, dtype)
    with _without_bars():
        merged.save_pretrained(folder, max_shard_size=SHARD)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def check_mergeable(model: PreTrainedModel, updates: Named) -> None:
    """Refuse what would change another module along: raises UserError for updates of a weight that is shared."""
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    twice = {name: names for names in shared.values() if len(names) > 1 for name in names}
    problems = [
        Problem(
            name, f"shares its weight with {', '.join(n for n in twice[f'{name}.weight'] if n != f'{name}.weight')}"
        )
        for name in updates
        if f"{name}.weight" in twice
    ]
    if problems:
        raise UserError(problems)


@torch.no_grad()
def merge(model: PreTrainedModel, updates: Named, dtype: torch.dtype) -> PreTrainedModel:
    """The dense model of base and updates on the CPU, in `dtype`; `model` loses its weights.

    The result is to be saved, not run: buffers that no file holds are not filled in.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(config, dtype=dtype)
    dense.generation_config = model.generation_config
    modules: dict[str, nn.Module] = dict(model.named_modules())
    taken: dict[int, nn.Parameter] = {}  # By the dense model's own parameter: a tied head has its embedding's.
    for path, module in dense.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in taken:
                name = f"{path}.{leaf}" if path else leaf
                update = updates.get(path) if leaf == "weight" else updates.get(name)
                value = _take(modules.get(path), modules, name, update, dtype)
                if value.shape != parameter.shape:
                    raise RuntimeError(f"{name} is {list(value.shape)} in the base, {list(parameter.shape)} when dense")
                taken[id(parameter)] = nn.Parameter(value, requires_grad=False)
            module._parameters[leaf] = taken[id(parameter)]
        for leaf, buffer in list(module._buffers.items()):
            held = getattr(modules.get(path), leaf, None)
            if buffer is not None and buffer.is_meta and isinstance(held, torch.Tensor):
                module._buffers[leaf] = held.detach().cpu()
    dense.tie_weights()
    return dense


def _take(
    module: nn.Module | None, modules: dict[str, nn.Module], name: str, update: Update | None, dtype: torch.dtype
) -> torch.Tensor:
    """One tensor of the dense model; the base has an empty one in its place afterwards."""
    leaf = name.rpartition(".")[2]
    inner = modules.get(name)  # Packed experts stand where a parameter was.
    if inner is not None:
        return cast(Any, inner).dequantise(torch.float32).to("cpu", dtype)
    assert module is not None, f"the base has no {name}"
    held = getattr(module, leaf, None)
    if leaf == "weight" and (update is not None or is_quantised(module)):
        wide = dequantise(module, torch.float32)
        if update is not None:
            wide = wide + update.delta().to(wide.device)
        value = (wide.t() if isinstance(module, Conv1D) else wide).to("cpu", dtype).contiguous()
    else:
        assert isinstance(held, torch.Tensor), f"the base has no {name}"
        if update is not None:
            delta = update.delta().to(held.device)
            held = held.float() + (delta.mT if is_transposed(module) else delta)
        value = held.detach().to("cpu", dtype) if held.is_floating_point() else held.detach().cpu()
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value.new_empty(0), requires_grad=False)
    return value


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype that a model folder's configuration states; None where it states none."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    for owner in (config, cast(dict[str, Any], inner)):
        name = owner.get("dtype") or owner.get("torch_dtype")
        found = getattr(torch, str(name), None)
        if isinstance(found, torch.dtype):
            return found
    return None
