"""Memory of this process as the run's events report it: the device's on CUDA, resident memory elsewhere."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch

from longtune.engine.devices import resident

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Start the peak anew, so that it is not that of loading a model: of a CUDA device, or of this process on Linux.

    Elsewhere a process's peak can't be reset.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Not Linux, or a sandbox: the peak then stays that of the whole process.
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Highest memory in bytes since `reset_peak`: `torch.cuda.max_memory_allocated`, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # The kernel's high-water mark lags a little behind the resident size.
    return max(_high_water(), active_bytes(device))


def _high_water() -> int:
    """Peak resident memory of this process, as far back as the system remembers."""
    if _STATUS.exists():
        found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def active_bytes(device: torch.device) -> int:
    """Memory in use now, in bytes; 0 where the system doesn't say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return resident()
