"""A merged model in MLX's layout, for mlx-lm without an adapter.

From an MLX base: its own files, tensor by tensor, with the adapted weights merged in fp32; packed ones become plain, or
with `requantise` stay packed as they are, and adapted ones are packed again in their own format. From any other base:
what `merged` writes, marked as MLX's; reading it again shows whether mlx-lm's names are the same.
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
from longtune.export import merged
from longtune.export.combine import Named
from longtune.model.adapter_files import Update
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
from longtune.model.packed.writer import ShardWriter, with_rope_keys

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_PARTS = ("scales", "biases", "global_scale")


def check(loaded: Loaded, updates: Named, requantise: bool) -> None:
    """Raises UserError for what can't be written: `requantise` without a quantised MLX base, names that MLX lacks."""
    place = "export --to mlx-merged"
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
    merged.write(folder, loaded.model, updates, dtype=dtype, tokenizer=loaded.tokenizer)
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        save_file(tensors, file, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(with_rope_keys(config), indent=2) + "\n")


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
