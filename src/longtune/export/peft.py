"""PEFT's layout: adapter_config.json and adapter_model.safetensors, as peft, transformers and vLLM read them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from longtune.export.combine import Named, commonest
from longtune.model.adapter_files import CONFIG, PREFIX, WEIGHTS
from longtune.model.experts import joined


def write(
    folder: Path,
    updates: Named,
    *,
    targets: Sequence[str],
    base: str,
    rslora: bool,
    parameters: Sequence[str] = (),
    paths: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write an adapter.

    The commonest rank and scale become the configuration's `r` and `lora_alpha`; modules that differ are listed in
    `rank_pattern` and `alpha_pattern`.

    Args:
        targets: what `target_modules` says.
        base: name of the base model.
        parameters: what `target_parameters` says.
        paths: path in the file of each stack of experts (`experts.nested_paths`).
        rslora: say the scales as alpha / sqrt(rank) instead of alpha / rank.
        dtype: of the tensors; the default is their own.
    """
    unit = math.sqrt if rslora else float
    alphas = {name: _number(update.scale * unit(update.rank)) for name, update in updates.items()}
    rank = int(commonest([update.rank for update in updates.values()]))
    alpha = commonest([alphas[name] for name, update in updates.items() if update.rank == rank])
    longer = {name[at + 1 :] for name in updates for at, letter in enumerate(name) if letter == "."}
    keys = {name: ("^" if name in longer else "") + re.escape(name) for name in updates}
    config = LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),
        target_modules=list(targets),
        target_parameters=list(parameters) or None,
        rank_pattern={keys[name]: update.rank for name, update in updates.items() if update.rank != rank},
        alpha_pattern=cast(dict[str, int], {keys[name]: alphas[name] for name in updates if alphas[name] != alpha}),
        use_rslora=rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    written = json.loads((folder / CONFIG).read_text())
    written["target_modules"] = sorted(written["target_modules"])
    (folder / CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    tensors: dict[str, torch.Tensor] = {}
    for name, update in updates.items():
        pair = joined(update.down_RI, update.up_OR) if update.stacked else (update.down_RI, update.up_OR)
        path = (paths or {}).get(name, name)
        for side, tensor in zip("AB", pair, strict=True):
            tensors[f"{PREFIX}{path}.lora_{side}.weight"] = tensor.to(dtype or tensor.dtype).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _number(alpha: float) -> float:
    """What was multiplied by a rank's root and divided again loses its last digits; whole numbers stay whole."""
    rounded = float(f"{alpha:.12g}")
    return int(rounded) if rounded.is_integer() else rounded
