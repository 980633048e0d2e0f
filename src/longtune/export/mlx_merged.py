"""A merged model in MLX's layout, for mlx-lm without an adapter.

From an MLX base: its own files, tensor by tensor, with the adapted weights merged in fp32; packed ones become plain, or
with `requantise` stay packed as they are, and adapted ones are packed again in their own format. From any other base:
what `merged` writes, marked as MLX's where its names are. Experts need no other names: mlx-lm stacks those of
transformers' files when it reads them. Only interleaved gates and ups it reads as MLX lays them out, or in 4 bits.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from longtune.errors import Problem, UserError
from longtune.export import merged, mlx_check
from longtune.export.combine import Named
from longtune.model.adapter_files import Update
from longtune.model.experts import find_stacks, is_transposed
from longtune.model.loading import Loaded
from longtune.model.packed.checkpoint import (
    Shards,
    encode_floats,
    format_of,
    is_mlx,
    quantisation_of,
    read_config,
    without_quantisation,
)
from longtune.model.packed.modules import PackedLinear, PackedWeight
from longtune.model.packed.quantiser import Quantised, quantise
from longtune.model.packed.storage import dequantise
from longtune.model.packed.writer import ShardWriter, with_older_keys

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_PARTS = ("scales", "biases", "global_scale")


def check(loaded: Loaded, updates: Named, requantise: bool) -> None:
    """Raises UserError for what can't be written: `requantise` without a quantised MLX base, names that MLX lacks."""
    place = "export --to mlx-merged"
    kind = str(loaded.model.config.model_type)
    if not mlx_check.knows(loaded.model.config.to_dict()):
        reason = f"mlx-lm, as it is installed here, has no architecture {kind!r}"
        raise UserError(Problem(place, reason, "pip install -U mlx-lm, or use --to merged"))
    mlx = loaded.path is not None and loaded.path.is_dir() and is_mlx(loaded.path)
    if requantise and not (mlx and quantisation_of(read_config(cast(Path, loaded.path)))):
        fix = "leave --requantise out, and quantise what is written: longtune quantise"
        raise UserError(Problem(f"{place} --requantise", f"{loaded.name} is no quantised MLX checkpoint", fix))
    if not mlx:
        return
    with Shards(cast(Path, loaded.path)) as shards:
        prefix = _prefix(shards)
        lost = [name for name in updates if f"{prefix}{name}.weight" not in shards]
    if lost:
        raise UserError([Problem(name, "has no tensor of its own in the MLX checkpoint") for name in lost[:10]])


def write(folder: Path, loaded: Loaded, updates: Named, *, dtype: torch.dtype, requantise: bool = False) -> None:
    """Write the merged checkpoint.

    Args:
        loaded: the base with its tokenizer; of a base that isn't MLX's the weights are gone afterwards.
        dtype: of plain weights.
        requantise: see the head of this file.
    """
    if loaded.path is not None and loaded.path.is_dir() and is_mlx(loaded.path):
        _write_from_mlx(folder, loaded.path, updates, dtype, requantise)
        return
    if _interleaved(loaded.model):
        _write_stacks(folder, loaded, updates, dtype)
    else:
        stacks = bool(find_stacks(loaded.model))
        merged.write(folder, loaded.model, updates, dtype=dtype, tokenizer=loaded.tokenizer)
        for file in () if stacks else folder.glob("model*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            save_file(tensors, file, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(with_older_keys(config), indent=2) + "\n")


def _interleaved(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of experts whose gates and ups alternate, by their paths."""
    return {path: module for path, module in model.named_modules() if getattr(module, "is_concatenated", True) is False}


def _write_stacks(folder: Path, loaded: Loaded, updates: Named, dtype: torch.dtype) -> None:
    """Write the merged model with gates, ups and downs of its experts as MLX has them, [E, out, in] each."""
    dense = merged.merge(loaded.model, updates, dtype)
    owners, kept = _interleaved(dense), dense.state_dict()
    writer = ShardWriter(folder)
    tensors = dict(dense.named_parameters())
    tensors |= {name: buffer for name, buffer in dense.named_buffers() if name in kept}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        for key, value in _as_mlx(leaf, tensor, owners[path]) if path in owners else [(leaf, tensor)]:
            writer.add(f"{path}.{key}", value)
    writer.close()
    dense.config.save_pretrained(folder)
    if dense.generation_config is not None:
        dense.generation_config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _as_mlx(leaf: str, tensor: torch.Tensor, owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A tensor of interleaved experts (gate_up_proj, down_proj, or the bias of one) as MLX's."""
    stem, kind = (leaf.removesuffix("_bias"), "bias") if leaf.endswith("_bias") else (leaf, "weight")
    if kind == "weight" and is_transposed(owner):
        tensor = tensor.mT
    if stem != "gate_up_proj":
        return [(f"{stem}.{kind}", tensor)]
    return [(f"gate_proj.{kind}", tensor[:, ::2]), (f"up_proj.{kind}", tensor[:, 1::2])]


def _write_from_mlx(folder: Path, base: Path, updates: Named, dtype: torch.dtype, requantise: bool) -> None:
    config = read_config(base)
    quantisation = quantisation_of(config) or {}
    writer = ShardWriter(folder)
    with Shards(base) as shards:
        prefix = _prefix(shards)
        for name in shards:
            path, _, leaf = name.rpartition(".")
            if leaf in _PARTS and f"{path}.weight" in shards:
                continue  # Written with their weight.
            for key, tensor in _tensors(name, shards, quantisation, updates, prefix, dtype, requantise):
                writer.add(key, tensor)
    writer.close()
    if not requantise:
        config = without_quantisation(config)
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(encode_floats(config), indent=2) + "\n")
    for pattern in _COPIED:
        for file in sorted(base.glob(pattern)):
            if file.name != "config.json" and not file.name.endswith("index.json") and file.is_file():
                shutil.copyfile(file, folder / file.name)


def _tensors(
    name: str,
    shards: Shards,
    quantisation: dict[str, Any],
    updates: Named,
    prefix: str,
    dtype: torch.dtype,
    requantise: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What one tensor of the base becomes."""
    path, _, leaf = name.rpartition(".")
    update = updates.get(path.removeprefix(prefix)) if leaf == "weight" else None
    tensor = shards.get(name)
    if leaf != "weight" or f"{path}.scales" not in shards:
        wide = tensor.float() + update.delta() if update is not None else tensor
        yield name, wide.to(dtype) if wide.is_floating_point() else wide
        return
    parts = {part: shards.find(f"{path}.{part}") for part in _PARTS}
    if update is None and requantise:
        yield name, tensor
        yield from ((f"{path}.{part}", value) for part, value in parts.items() if value is not None)
        return
    columns = tensor.shape[-1] * 32 // _bits(path, quantisation)
    format = format_of(path, columns, shards, quantisation)
    assert format is not None, f"{path} has scales"
    packed = PackedWeight(
        format,
        columns,
        tensor,
        cast(torch.Tensor, parts["scales"]),
        parts["biases"],
        parts["global_scale"],
        compute_dtype=torch.float32,
    )
    wide = packed.dequantise(torch.float32)
    if update is not None:
        wide = wide + update.delta()
    if requantise:
        yield from _quantised_as(packed, wide).tensors(path).items()
        if packed.global_scale is not None:
            yield f"{path}.global_scale", packed.global_scale
    else:
        yield name, wide.to(dtype)


def _quantised_as(packed: PackedWeight, wide: torch.Tensor) -> Quantised:
    """Numbers in the format of a packed weight, with scales of its dtype and its own global scale."""
    return quantise(wide, packed.format, packed.scales.dtype, packed.global_scale)


@contextlib.contextmanager
def requantised(model: nn.Module, updates: Named) -> Iterator[None]:
    """For a while every module with an update computes with W + s B A as its format holds it; plain ones stay plain."""
    handles = []
    try:
        for name, update in updates.items():
            module = model.get_submodule(name)

            def hook(module: Any, args: Any, output: torch.Tensor, update: Update = update) -> torch.Tensor:
                wide = dequantise(module, torch.float32) + update.delta()
                if not isinstance(module, PackedLinear):
                    return F.linear(args[0], wide.to(output.dtype), module.bias)
                again = _quantised_as(module, wide)
                numbers = PackedWeight(
                    module.format,
                    module.columns,
                    again.weight,
                    again.scales,
                    again.biases,
                    module.global_scale,
                    compute_dtype=output.dtype,
                )
                return F.linear(args[0], numbers.dequantise(), module.bias)

            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bits(path: str, quantisation: dict[str, Any]) -> int:
    entry = quantisation.get(path)
    owner = entry if isinstance(entry, dict) and "bits" in entry else quantisation
    return int(owner.get("bits", 8 if owner.get("mode") == "mxfp8" else 4))


def _prefix(shards: Shards) -> str:
    """What the names of an image model's text model begin with."""
    return "language_model." if any(name.startswith("language_model.") for name in shards) else ""
