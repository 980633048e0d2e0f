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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from longtune.errors import Problem, UserError
from longtune.model.lora import use_lean_layers
from longtune.model.targets import ALL_LINEAR, choose_targets, shortest_patterns

ADAPTER = "default"
"""PEFT's name of the adapter that is trained."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
"""The two files of a saved adapter."""

_PREFIX = "base_model.model."


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
) -> PeftModel:
    """Give a model a fresh trainable adapter: y = base(x) + s * dropout(x) A^T B^T.

    A [rank, in] is uniform in +-1/sqrt(in), a function of the seed and the module's name alone; B [out, rank] is
    zero. Both are fp32 (fp64 in an fp64 model). s = alpha / rank, or alpha / sqrt(rank) with `rslora`.

    Args:
        model: a causal LM; its parameters are frozen. It is changed in place.
        targets, layers: see `targets.choose_targets`.
        dropout: probability with which each input of A is dropped in training.
        rank_policy: only "constant" (the same rank everywhere).

    Raises:
        UserError: settings that can't be served; all of them at once.
    """
    problems: list[Problem] = []
    if rank < 1:
        problems.append(Problem("lora.rank", f"{rank} is below 1"))
    if not (alpha > 0 and math.isfinite(alpha)):
        problems.append(Problem("lora.alpha", f"{alpha} is not above 0"))
    if not 0 <= dropout < 1:
        problems.append(Problem("lora.dropout", f"{dropout} is not in [0, 1)"))
    if rank_policy != "constant":
        reason = f"{rank_policy!r} is not there: every target gets the same rank"
        problems.append(Problem("lora.rank_policy", reason, "use constant"))
    try:
        names = choose_targets(model, targets, layers)
    except UserError as error:
        problems.extend(error.problems)
        names = []
    if not problems and not names:
        problems.append(Problem("lora.targets", f"{type(model).__name__} has no linear in the chosen layers"))
    if problems:
        raise UserError(problems)
    config = use_lean_layers(
        LoraConfig(
            r=rank,
            lora_alpha=cast(int, alpha),  # PEFT computes with it as a number, and stores it as it is.
            target_modules=shortest_patterns(model, names),
            lora_dropout=dropout,
            use_rslora=rslora,
            task_type="CAUSAL_LM",
        )
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
    """Layers with an adapter, named as in the model without PEFT's wrapper."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            yield name.removeprefix(_PREFIX), module


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
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_adapter(model: PreTrainedModel, folder: str | os.PathLike[str], *, trainable: bool = False) -> PeftModel:
    """Put a saved PEFT adapter on its base model.

    Args:
        model: the base model; changed in place.
        folder: an adapter's folder, or a run's (then its `adapter/`).
        trainable: whether its parameters require gradients.

    Raises:
        UserError: no whole LoRA adapter lies there, or it doesn't fit the model (every mismatch is named).
    """
    path = find_adapter(folder)
    config = read_config(path)
    check_fit(model, path)
    try:
        with undisturbed():
            loaded = PeftModel.from_pretrained(
                model, str(path), config=use_lean_layers(config), is_trainable=trainable, local_files_only=True
            )
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        reason = f"its tensors are of other sizes than {CONFIG} says ({str(error).strip().splitlines()[1].strip()})"
        raise UserError(Problem(str(path), reason, "copy both of its files again")) from error
    lacking = sorted(set(_state(loaded)) - set(_read_shapes(path)))
    if lacking:
        raise UserError([Problem(str(path), f"has no tensor {name}") for name in lacking[:10]])
    return loaded


def init_adapter(model: PeftModel, folder: str | os.PathLike[str]) -> None:
    """Start a fresh adapter from the weights of a saved one (a warm start; the optimiser starts anew).

    Targets and ranks must be the same. Where the scales differ, B is multiplied by their ratio, so that the model
    computes what the saved adapter computed.

    Raises:
        UserError: every tensor that is missing, left over, or of another shape.
    """
    path = find_adapter(folder)
    config = read_config(path)
    found = _read_shapes(path)
    ours = {name: tuple(tensor.shape) for name, tensor in _state(model).items()}
    problems = []
    for name in sorted(found.keys() | ours.keys()):
        if found.get(name) != ours.get(name):
            here, there = (str(list(shape)) if shape else "nothing" for shape in (ours.get(name), found.get(name)))
            problems.append(Problem(f"init_adapter: {name}", f"{there} there, {here} here"))
    if problems:
        more = len(problems) - 10
        last = [Problem("init_adapter", f"and {more} more", "set lora.rank and lora.targets as in that adapter")]
        raise UserError([*problems[:10], *last] if more > 0 else problems)
    with safe_open(path / WEIGHTS, framework="pt") as file, torch.no_grad():
        for name, layer in _lora_layers(model):
            key = f"{_PREFIX}{name}"
            ratio = _scale(config, name) / layer.scaling[ADAPTER]
            down_RI, up_OR = _weights(layer)
            down_RI.copy_(file.get_tensor(f"{key}.lora_A.weight"))
            up_OR.copy_(file.get_tensor(f"{key}.lora_B.weight") * ratio)


def find_adapter(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, or the adapter of a run folder; checked to hold a configuration and safetensors weights."""
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file() and (path / "adapter" / CONFIG).is_file():
        path = path / "adapter"
    place = f"adapter: {folder}"
    if not path.is_dir():
        raise UserError(Problem(place, "there is no such folder", "name the folder that holds adapter_config.json"))
    if not (path / CONFIG).is_file():
        raise UserError(Problem(place, f"holds no {CONFIG}", "name an adapter's folder, or a run's"))
    if not (path / WEIGHTS).is_file():
        if (path / "adapter_model.bin").is_file():
            reason = "holds pickled weights, which can run code when they are read"
            raise UserError(Problem(place, reason, f"save it again with peft, as {WEIGHTS}"))
        raise UserError(Problem(place, f"holds no {WEIGHTS}"))
    return path


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


def read_config(path: Path) -> LoraConfig:
    place = str(path / CONFIG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keys of a newer PEFT are said to be ignored; the weights decide.
            config = PeftConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(Problem(place, f"can't be read ({error})")) from error
    if not isinstance(config, LoraConfig):
        raise UserError(Problem(place, f"is a {config.peft_type} adapter, not LoRA"))
    return config


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise UserError(Problem(str(path / WEIGHTS), f"can't be read ({error})", "save or copy it again")) from error


def check_fit(model: PreTrainedModel, path: Path) -> None:
    """Compare the file's A and B with the model's modules, before anything is injected."""
    modules = dict(model.named_modules())
    problems: list[Problem] = []
    for key, shape in _read_shapes(path).items():
        name, _, kind = key.removeprefix(_PREFIX).partition(".lora_")
        if kind not in ("A.weight", "B.weight"):
            continue
        module = modules.get(name)
        size = getattr(module, "in_features" if kind == "A.weight" else "out_features", None)
        if module is None:
            problems.append(Problem(name, "the adapter has it, the model has not"))
        elif size is not None and shape[1 if kind == "A.weight" else 0] != size:
            problems.append(
                Problem(name, f"lora_{kind[0]} is {list(shape)} in the adapter; the model's side is {size}")
            )
    if problems:
        more = len(problems) - 10
        shown = problems[:10] + ([Problem(str(path), f"and {more} more")] if more > 0 else [])
        raise UserError([Problem(str(path), "was made for another model"), *shown])


def _scale(config: LoraConfig, name: str) -> float:
    """What PEFT would scale a module's B A by."""
    rank_pattern, alpha_pattern = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = rank_pattern.get(get_pattern_key(list(rank_pattern), name), config.r)
    alpha = alpha_pattern.get(get_pattern_key(list(alpha_pattern), name), config.lora_alpha)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)
