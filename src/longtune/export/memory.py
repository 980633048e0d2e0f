"""In which dtype a model is loaded for an export: fp32 where that fits the memory, else as it is stored."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from longtune.export.merged import stored_dtype
from longtune.model.embedded import EMBEDDED, embedded_folder

_ROOM = 1.3
"""Memory that is asked for, as a multiple of the weights: activations of a short prompt, and the copy being written."""


def compute_dtype(model: str) -> tuple[str, str]:
    """(dtype as `load_model` takes it, what to tell the user if it isn't float32).

    Both sides of the comparison are computed in it. Weights that are stored in 16 bits are held exactly by either.
    """
    folder = embedded_folder() if model == EMBEDDED else Path(model).expanduser()
    free = available_bytes()
    stored = stored_dtype(folder) if folder.is_dir() else None
    if stored in (None, torch.float32) or free is None:
        return "float32", ""
    assert stored is not None
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    wide = size * 4 // stored.itemsize
    if wide * _ROOM <= free:
        return "float32", ""
    name = str(stored).removeprefix("torch.")
    need = f"{wide * _ROOM / 2**30:.0f} GiB in float32, of {free / 2**30:.0f} free"
    return name, f"compared in {name}, whose rounding is wider: the model needs {need}"


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system doesn't say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
