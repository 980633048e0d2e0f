"""LoRA adapters: adding, saving, loading, switching off, and grouping their parameters for the optimiser.

Injection and files are PEFT's; the layer is `lora.LeanLinear`; which modules are meant is decided in `targets`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from longtune.errors import Problem, UserError
from longtune.model.adapter_files import (
    CONFIG,
    PREFIX,
    Update,
    Updates,
    find_adapter,
    read_config,
    read_shapes,
    read_updates,
    stacked_for,
)
from longtune.model.experts import find_stacks, is_stack_path, joined, shortest_parameters, unwrapped
from longtune.model.lora import use_lean_layers
from longtune.model.names import match_names
from longtune.model.packed.checkpoint import shortened
from longtune.model.ranks import Ranks, choose_ranks, patterns
from longtune.model.targets import ALL_LINEAR, choose_targets, shortest_patterns

ADAPTER = "default"
"""PEFT's name of the adapter that is trained."""


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    targets: str | Sequence[str] = ALL_LINEAR,
    layers: str | Sequence[int] = "all",
    dropout: float = 0.0,
    rslora: bool = False,
    seed: int = 0,
    rank_policy: str = "constant",
    bits: Mapping[str, float] | None = None,
    kl: Mapping[str, float] | None = None,
) -> PeftModel:
    """Give a model a fresh trainable adapter: y = base(x) + s * dropout(x) A^T B^T.

    A [rank, in] is uniform in +-1/sqrt(in), a function of the seed and the module's name alone; B [out, rank] is
    zero. Both are fp32 (fp64 in an fp64 model). s = alpha / rank with the base rank, whichever rank a module gets;
    with `rslora`, s = alpha / sqrt(rank) with the module's own.

    Args:
        model: a causal LM; its parameters are frozen. It is changed in place.
        targets, layers: see `targets.choose_targets`.
        dropout: probability with which each input of A is dropped in training.
        rank_policy, bits, kl: see `ranks.choose_ranks`.

    Raises:
        UserError: settings that can't be served; all of them at once.
    """
    problems: list[Problem] = []
    stacks = find_stacks(model)
    if not (alpha > 0 and math.isfinite(alpha)):
        problems.append(Problem("lora.alpha", f"{alpha} is not above 0"))
    if not 0 <= dropout < 1:
        problems.append(Problem("lora.dropout", f"{dropout} is not in [0, 1)"))
    names: list[str] = []
    chosen: Ranks | None = None
    try:
        names = choose_targets(model, targets, layers)
    except UserError as error:
        problems.extend(error.problems)
    try:
        chosen = choose_ranks(rank_policy, rank, names, bits, kl)
    except UserError as error:
        problems.extend(error.problems)
    if dropout and any(name in stacks for name in names):
        reason = "adapters of experts' tensors take none: PEFT adapts the weight, and an input to drop from isn't there"
        problems.append(Problem("lora.dropout", reason, "set it to 0, or leave the experts out of lora.targets"))
    if not problems and not names:
        problems.append(Problem("lora.targets", f"{type(model).__name__} has no linear in the chosen layers"))
    if problems:
        raise UserError(problems)
    assert chosen is not None
    others = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    rank_pattern, alpha_pattern = patterns(chosen.by_name, rank, alpha, rslora=rslora, others=others)
    adapted_stacks = [name for name in names if name in stacks]
    config = use_lean_layers(
        LoraConfig(
            r=rank,
            lora_alpha=cast(int, alpha),  # PEFT computes with it as a number, and stores it as it is.
            rank_pattern=rank_pattern,
            alpha_pattern=cast(dict[str, int], alpha_pattern),
            target_modules=shortest_patterns(model, [name for name in names if name not in stacks]),
            target_parameters=shortest_parameters(model, adapted_stacks) if adapted_stacks else None,
            lora_dropout=dropout,
            use_rslora=rslora,
            task_type="CAUSAL_LM",
        ),
        model,
    )
    with undisturbed():
        wrapped = cast(PeftModel, get_peft_model(model, config))
    adapted = {name for name, _ in _lora_layers(wrapped)}
    if adapted != set(names):
        raise RuntimeError(f"PEFT adapted other modules than were chosen: {sorted(adapted ^ set(names))[:5]}")
    _draw_a(wrapped, seed)
    return wrapped


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Around PEFT's injection, which draws A from the global generator and warns without a reason."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)  # `load_adapter` raises instead.
        yield


def _draw_a(model: nn.Module, seed: int) -> None:
    """Draw every A on the CPU in fp32, so that it depends neither on the device nor on the other modules."""
    for name, layer in _lora_layers(model):
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        weight_RI, _ = _weights(layer)
        bound = weight_RI.shape[1] ** -0.5
        drawn_RI = torch.empty(weight_RI.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            weight_RI.copy_(drawn_RI)


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Layers with an adapter, named as in the model without PEFT's wrapper; those of stacks by the stack's name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            stack = isinstance(module, lora.ParamWrapper)
            yield f"{unwrapped(name)}.{module.parameter_name}" if stack else unwrapped(name), module


def _weights(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """A [rank, in] and B [out, rank] of a layer."""
    down, up = cast(nn.Linear, layer.lora_A[ADAPTER]), cast(nn.Linear, layer.lora_B[ADAPTER])
    return cast(nn.Parameter, down.weight), cast(nn.Parameter, up.weight)


def save_adapter(model: PeftModel, folder: str | os.PathLike[str]) -> None:
    """Write a whole PEFT adapter: adapter_config.json and adapter_model.safetensors.

    The folder appears, or replaces an older one, by renaming: a killed run never leaves half of it.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    old = work.with_name(f"{work.name}-old")
    try:
        # "auto" would ask the hub whether the vocabulary has grown.
        model.save_pretrained(str(work), save_embedding_layers=cast(str, False), selected_adapters=[ADAPTER])
        (work / "README.md").unlink(missing_ok=True)  # PEFT's model card is a form to fill in.
        _sort_targets(work / CONFIG)
        work.chmod(0o755)
        if folder.exists():
            folder.rename(old)
        work.rename(folder)
    finally:
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def _sort_targets(file: Path) -> None:
    """PEFT keeps the targets as a set, whose order changes from one process to the next."""
    config = json.loads(file.read_text())
    for key in ("target_modules", "target_parameters"):
        if isinstance(config.get(key), list):
            config[key].sort()
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_adapter(model: PreTrainedModel, folder: str | os.PathLike[str], *, trainable: bool = False) -> PeftModel:
    """Put a saved PEFT adapter on its base model.

    Args:
        model: the base model; changed in place.
        folder: an adapter's folder, or a run's (then its `adapter/`).
        trainable: whether its parameters require gradients.

    Raises:
        UserError: no whole LoRA adapter lies there, it doesn't fit the model (every mismatch is named), or it holds
            values that are not finite.
    """
    path = find_adapter(folder)
    config = read_config(path)
    check_fit(model, path, config)
    base_names = [name for name, _ in model.named_parameters()]
    try:
        with undisturbed():
            loaded = PeftModel.from_pretrained(
                model, str(path), config=use_lean_layers(config, model), is_trainable=trainable, local_files_only=True
            )
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        reason = f"its tensors are of other sizes than {CONFIG} says ({str(error).strip().splitlines()[1].strip()})"
        raise UserError(Problem(str(path), reason, "copy both of its files again")) from error
    there, wanted = set(read_shapes(path)), set(_state(loaded))
    # Embeddings of the base that PEFT saved along have a place, too.
    left = there - wanted - {f"{PREFIX}{name}" for name in base_names}
    unmeant = f"is meant by nothing in {CONFIG}, and would be left out"
    problems = [Problem(str(path), f"has no tensor {name}") for name in sorted(wanted - there)]
    problems += [Problem(f"{path}: {name}", unmeant) for name in sorted(left)]
    if problems:
        raise UserError(shortened(problems))
    broken = sorted(name for name, tensor in _state(loaded).items() if not bool(tensor.isfinite().all()))
    if broken:
        reason = f"{len(broken)} of its tensors hold values that are not finite, such as {broken[0]}"
        raise UserError(Problem(str(path), reason, "use an earlier checkpoint, or a lower learning rate"))
    return loaded


def init_adapter(model: PeftModel, folder: str | os.PathLike[str]) -> None:
    """Start a fresh adapter from the weights of a saved one (a warm start; the optimiser starts anew).

    The saved one may be PEFT's or mlx-lm's. Targets and ranks must be the same. Where the scales differ, B is
    multiplied by their ratio, so that the model computes what the saved adapter computed.

    Raises:
        UserError: every tensor that is missing, left over, or of another shape.
    """
    saved = read_updates(folder)
    layers = dict(_lora_layers(model))
    matched = match_names(saved.by_name, layers)
    found = {matched.get(name, name): update for name, update in saved.by_name.items()}
    problems: list[Problem] = []
    found |= stacked_for(saved, model, problems)
    for name in sorted(found.keys() | layers.keys()):
        there = _stored(found[name]) if name in found else (None, None)
        here = _weights(layers[name]) if name in layers else (None, None)
        for side, theirs, ours in zip("AB", there, here, strict=True):
            shapes = [list(tensor.shape) if tensor is not None else "nothing" for tensor in (theirs, ours)]
            if shapes[0] != shapes[1]:
                place = f"init_adapter: {name}.lora_{side}"
                problems.append(Problem(place, f"{shapes[0]} there, {shapes[1]} here"))
    if problems:
        more = len(problems) - 10
        fix = "set lora.rank, lora.rank_policy and lora.targets as in that adapter"
        last = [Problem("init_adapter", f"and {more} more", fix)]
        raise UserError([*problems[:10], *last] if more > 0 else problems)
    with torch.no_grad():
        for name, layer in layers.items():
            update = found[name]
            down_RI, up_OR = _weights(layer)
            down, up = _stored(update)
            down_RI.copy_(down)
            up_OR.copy_(up * (update.scale / layer.scaling[ADAPTER]))


def _stored(update: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B in the shapes that PEFT gives them."""
    return joined(update.down_RI, update.up_OR) if update.stacked else (update.down_RI, update.up_OR)


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """The base model for a while: every adapter is switched off, and afterwards each module is as it was.

    No scale is written, and neither trainability nor a module that was off already is changed.
    """
    wrappers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [wrapper._disable_adapters for wrapper in wrappers]
    # PEFT's own switch also turns gradients off and, when turned back, on for every active adapter.
    try:
        for wrapper in wrappers:
            wrapper._disable_adapters = True
        yield
    finally:
        for wrapper, disabled in zip(wrappers, before, strict=True):
            wrapper._disable_adapters = disabled


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float = 0.0, lora_plus_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for `torch.optim.AdamW`: the trainable parameters, every B in a group of its own.

    LoRA+ (arXiv 2402.12354): B learns with `learning_rate * lora_plus_ratio`. Groups carry a `name`.
    """
    if not lora_plus_ratio >= 1:
        raise UserError(Problem("lora.lora_plus_ratio", f"{lora_plus_ratio} is below 1", "1 means one rate for all"))
    rest: list[nn.Parameter] = []
    ups: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (ups if ".lora_B." in name or ".lora_embedding_B." in name else rest).append(parameter)
    common = {"weight_decay": weight_decay}
    groups = [
        {"name": "lora_A", "params": rest, "lr": learning_rate, **common},
        {"name": "lora_B", "params": ups, "lr": learning_rate * lora_plus_ratio, **common},
    ]
    return [group for group in groups if group["params"]]


def _state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names that they have in files."""
    return get_peft_model_state_dict(model, save_embedding_layers=False)


def check_fit(model: PreTrainedModel, path: Path, config: LoraConfig) -> None:
    """Compare the file's A and B with the model's modules and stacks of experts, before anything is injected."""
    modules = dict(model.named_modules())
    problems: list[Problem] = []
    stacks: dict[str, dict[str, torch.Tensor]] = {}
    for key, shape in read_shapes(path).items():
        name, _, kind = key.removeprefix(PREFIX).partition(".lora_")
        if kind not in ("A.weight", "B.weight"):
            continue
        if is_stack_path(config, name):
            stacks.setdefault(name, {})[kind[0]] = torch.empty(shape, device="meta")
            continue
        module = modules.get(name)
        size = getattr(module, "in_features" if kind == "A.weight" else "out_features", None)
        if module is None:
            problems.append(Problem(name, "the adapter has it, the model has not"))
        elif size is not None and shape[1 if kind == "A.weight" else 0] != size:
            problems.append(
                Problem(name, f"lora_{kind[0]} is {list(shape)} in the adapter; the model's side is {size}")
            )
    whole = {name: (pair["A"], pair["B"]) for name, pair in stacks.items() if len(pair) == 2}
    stacked_for(Updates(path, "peft", {}, stacks=whole, config=config), model, problems)
    if problems:
        more = len(problems) - 10
        shown = problems[:10] + ([Problem(str(path), f"and {more} more")] if more > 0 else [])
        raise UserError([Problem(str(path), "was made for another model"), *shown])
