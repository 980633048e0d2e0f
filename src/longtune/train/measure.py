"""Memory of this process as the run's events report it: the device's on CUDA, resident memory elsewhere."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def reset_peak(device: torch.device) -> None:
    """Starts the peak of a CUDA device anew; a process's peak resident memory can't be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Highest memory so far in bytes: `torch.cuda.max_memory_allocated`, or peak resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # The kernel's high-water mark lags a little behind the resident size.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT, active_bytes(device))


def active_bytes(device: torch.device) -> int:
    """Memory in use now, in bytes; 0 where the system doesn't say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
