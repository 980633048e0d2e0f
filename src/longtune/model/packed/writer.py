"""Writing tensors in MLX's layout of files: shards of bounded size with their index, and a config that mlx-lm reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

SHARD_BYTES = 5 * 10**9
"""Largest size of a file; a single larger tensor gets one of its own."""


class ShardWriter:
    """Tensors into `model.safetensors`, or into numbered files with `model.safetensors.index.json`.

    Only one file's tensors are held at a time. Call `close` at the end.

    Args:
        folder: where the files go. limit: bytes of a file.
    """

    def __init__(self, folder: Path, limit: int = SHARD_BYTES):
        self.folder = folder
        self.limit = limit
        self.total = 0
        self._held: dict[str, torch.Tensor] = {}
        self._size = 0
        self._files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        if self._held and self._size + size > self.limit:
            self._flush()
        self._held[name] = tensor.detach().to("cpu").contiguous()
        self._size += size
        self.total += size

    def close(self) -> None:
        """Write what is held, and give the files their names."""
        if self._held or not self._files:
            self._flush()
        count = len(self._files)
        where: dict[str, str] = {}
        for number, (file, names) in enumerate(self._files, 1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            file.rename(self.folder / name)
            where |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        file = self.folder / f".part-{len(self._files)}"
        save_file(self._held, file, metadata={"format": "mlx"})
        self._files.append((file, list(self._held)))
        self._held, self._size = {}, 0


def with_older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The config with what transformers 5 renamed under the older keys, too, which mlx-lm reads.

    transformers writes `rope_parameters`; mlx-lm reads `rope_theta`, `partial_rotary_factor` and `rope_scaling` (which
    must be there, if only as null), and silently takes a theta of 10,000 where they are missing. A key that has two
    names for one architecture (`num_local_experts` is Qwen3's `num_experts`) is written under one alone; mlx-lm may
    know the other.
    """
    found = dict(config)
    kind = str(config.get("model_type"))
    names = getattr(CONFIG_MAPPING[kind], "attribute_map", None) if kind in CONFIG_MAPPING else None
    for other, written in (names or {}).items():
        if written in config:
            found.setdefault(other, config[written])
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        found.setdefault("rope_theta", rope["rope_theta"])
        if "partial_rotary_factor" in rope:
            found.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
        scaled = rope.get("rope_type", "default") != "default"
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        found.setdefault("rope_scaling", rest if scaled else None)
    if isinstance(config.get("text_config"), dict):
        found["text_config"] = with_older_keys(config["text_config"])
    return found
