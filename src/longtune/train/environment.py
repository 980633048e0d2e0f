"""What a run ran on: versions and device, for environment.json and `longtune doctor`."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("longtune", "torch", "transformers", "peft", "safetensors", "tokenizers", "datasets")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each package, None where it is missing."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_name(device: torch.device) -> str:
    """The device in words: a card's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, system and device as JSON values."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": versions(),
        "device": str(device),
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
    }
