"""The frozen model that a preference run compares with: the base, or the base under a second, frozen adapter.

Switching there and back writes one attribute of PEFT's wrappers and nothing else. What is computed under the
reference, and where it is kept, belongs to the callers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from longtune.errors import Problem, UserError
from longtune.model import adapter_files, adapters
from longtune.model.lora import use_lean_layers
from longtune.model.packed import PackedWeight

REFERENCE = "reference"
"""PEFT's name of the frozen adapter."""

_SAMPLES = 256
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VOLATILE = ("transformers_version", "use_cache", "dtype", "torch_dtype")


def load_reference(model: PeftModel, folder: str | os.PathLike[str]) -> None:
    """Put a saved adapter beside the trained one, frozen and inactive.

    Nothing of the trained adapter changes: neither what is active, nor what requires gradients or is in training mode.

    Args:
        model: with its trained adapter.
        folder: an adapter's folder, or a run's.

    Raises:
        UserError: no whole LoRA adapter lies there, or it doesn't fit the model.
    """
    path = adapter_files.find_adapter(folder)
    config = adapter_files.read_config(path)
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    adapters.check_fit(base, path, config)
    if config.modules_to_save:
        reason = f"holds whole modules ({', '.join(config.modules_to_save)}), which can't be switched"
        raise UserError(Problem(str(path), reason, "name an adapter of LoRA weights alone"))
    trained = model.peft_config[adapters.ADAPTER].target_parameters
    if {*(config.target_parameters or ())} != {*(trained or ())} and config.target_parameters and trained:
        reason = f"adapts {_listed(config.target_parameters)} of the experts, and the trained one {_listed(trained)}"
        raise UserError(Problem(str(path), reason, "PEFT switches between adapters of the same experts' tensors alone"))
    config.inference_mode = True
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    training = [module for module in model.modules() if module.training]
    wrapped = {layer: layer._active_adapter for layer in _layers(model)}
    with adapters.undisturbed():
        model.add_adapter(REFERENCE, use_lean_layers(config, base))
        weights = load_file(path / adapter_files.WEIGHTS)
        loaded = set_peft_model_state_dict(model, weights, adapter_name=REFERENCE)
    lacking = [name for name in loaded.missing_keys if f".{REFERENCE}." in name] + list(loaded.unexpected_keys)
    if lacking:
        raise UserError([Problem(str(path), f"has no place here for {name}") for name in lacking[:10]])
    # PEFT's injection sets the trained adapter active and trainable again, and new layers get it as well.
    for layer in _layers(model):
        layer._active_adapter = wrapped.get(layer, [adapters.ADAPTER])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before.get(_name_before(name, before), False))
    for module in model.modules():
        module.training = False
    for module in training:
        module.training = True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _name_before(name: str, before: dict[str, bool]) -> str:
    """The name of a parameter before the layer around it got its first adapter."""
    return name if name in before else name.replace(".base_layer.", ".")


@contextlib.contextmanager
def reference_active(model: nn.Module) -> Iterator[None]:
    """The reference for a while: the frozen adapter if there is one, else the base model alone.

    Afterwards each module is as it was. Dropout is the caller's matter, as it is everywhere.
    """
    layers = list(_layers(model))
    if not any(REFERENCE in layer._all_available_adapter_names() for layer in layers):
        with adapters.adapters_disabled(model):
            yield
        return
    before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [REFERENCE], False
        yield
    finally:
        for layer, active, disabled in before:
            layer._active_adapter, layer._disable_adapters = active, disabled


def _layers(model: nn.Module) -> Iterator[BaseTunerLayer]:
    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))


def fingerprint(model: nn.Module) -> str:
    """sha256 (hex) of the base model: its configuration, and samples and the sum of the bits of every weight.

    Any change of a single weight changes the sum; moved weights are left to the samples.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    config = base.config.to_dict()  # pyright: ignore[reportCallIssue]
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, parameter in [*base.named_parameters(), *_packed_tensors(base)]:
        if ".lora_" in name:
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].cpu()
        digest.update(f"{name.replace('.base_layer', '')} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        bits = flat.view(_BITS[flat.element_size()])
        digest.update(str(int(bits.sum(dtype=torch.int64))).encode())
    return digest.hexdigest()


def _packed_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What packed weights hold: buffers, not parameters."""
    for path, module in model.named_modules():
        if isinstance(module, PackedWeight):
            yield from ((f"{path}.{name}", buffer) for name, buffer in module.named_buffers(recurse=False))


def adapter_digest(folder: str | os.PathLike[str]) -> str:
    """sha256 (hex) of a saved adapter's two files."""
    path: Path = adapter_files.find_adapter(folder)
    digest = hashlib.sha256()
    for name in (adapter_files.CONFIG, adapter_files.WEIGHTS):
        digest.update((path / name).read_bytes())
    return digest.hexdigest()
