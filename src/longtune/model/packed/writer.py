"""Writing tensors in MLX's layout of files: shards of bounded size with their index, and a config that mlx-lm reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


def with_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its rotary embedding under the older keys, too.

    transformers 5 writes `rope_parameters`; mlx-lm reads `rope_theta` and `rope_scaling`, and silently takes a theta of
    10,000 where they are missing.
    """
    found = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        found.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            found.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    if isinstance(config.get("text_config"), dict):
        found["text_config"] = with_rope_keys(config["text_config"])
    return found
