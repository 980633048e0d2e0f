"""mlx-lm's layout of an adapter: adapters.safetensors and adapter_config.json, for `mlx_lm.generate --adapter-path`.

mlx-lm knows one rank and one scale for all modules: smaller ranks are padded with zeros, and differences of scale go
into B.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from longtune.export.combine import Named, even, of_one_scale
from longtune.model.adapter_files import CONFIG, MLX_WEIGHTS

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


def write(folder: Path, updates: Named, *, layers: int, base: str, dtype: torch.dtype | None = None) -> None:
    """Write an adapter.

    Args:
        layers: decoder layers of the model. mlx-lm adapts the last `num_layers` of them; what the file lacks there
            stays without effect.
        base: name of the base model, for the reader; mlx-lm is told the model by its user.
        dtype: of the tensors; the default is their own.
    """
    updates = of_one_scale(even(updates))
    first = next(iter(updates.values()))
    keys: set[str] = set()
    lowest = layers
    tensors: dict[str, torch.Tensor] = {}
    for name, update in updates.items():
        path = mlx_name(name)
        found = _LAYER.search(path)
        if found:
            lowest = min(lowest, int(found[1]))
        keys.add(found[2] if found else path)
        tensors[f"{path}.lora_a"] = update.down_RI.t().to(dtype or update.down_RI.dtype).contiguous()
        tensors[f"{path}.lora_b"] = update.up_OR.t().to(dtype or update.up_OR.dtype).contiguous()
    config = {
        "fine_tune_type": "lora",
        "model": base,
        "num_layers": layers - lowest,
        "lora_parameters": {"rank": first.rank, "scale": first.scale, "dropout": 0.0, "keys": sorted(keys)},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, folder / MLX_WEIGHTS, metadata={"format": "mlx"})


def mlx_name(name: str) -> str:
    """A module's path in mlx-lm's model: picture models hold their text model the other way round there."""
    return re.sub(r"^model\.language_model\.", "language_model.model.", name)
