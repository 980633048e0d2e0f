"""How much memory a step may take: what was asked for, or what is free on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from longtune.engine import devices
from longtune.errors import Problem, UserError

CONTEXT = 600_000_000
"""Bytes that a CUDA context takes outside the allocator."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may take, in bytes: the device's memory, the host's beside it, and disk.

    On a CPU `device` is the whole process, and `host` is not used.
    """

    device: int
    host: int
    disk: int


def memory_bytes(text: str) -> int | None:
    """Bytes of a size like 24GB (10^9) or 24GiB (2^30); None for "auto".

    Raises:
        UserError: it is no size.
    """
    if text == "auto":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip())
    if match is None or not float(match[1]):
        raise UserError(Problem("memory", f"{text!r} is no size", "write it like 24GB or 22.5GiB"))
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("KMGT".index(match[2]) + 1))


def budget_here(device: torch.device, memory: int | None = None, scratch_free: int = 0) -> Budget:
    """What may be taken on this machine.

    Args:
        device: a device that is present.
        memory: bytes that were asked for; None is all that is free but a margin.
        scratch_free: free bytes of the disk for boundaries.
    """
    host = devices.host_memory()
    spare = int(0.9 * host["available"])
    if device.type == "cpu":
        room = devices.resident() + host["available"] - max(512 << 20, host["total"] // 20)
        return Budget(min(room, memory) if memory else room, 0, int(0.9 * scratch_free))
    own = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    room = devices.free_memory(device) + own + CONTEXT
    room -= max(256 << 20, room // 50)
    return Budget(min(room, memory) if memory else room, spare, int(0.9 * scratch_free))
