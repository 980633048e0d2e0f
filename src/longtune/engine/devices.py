"""What is known of devices: memory and the rates that a step is bound by, measured here or from public figures.

A device that is present is measured in a moment (`measure`); one that isn't is looked up by name (`known`). Rates are
what a step reaches, not what a data sheet promises.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longtune.attention.select import Choice, choose
from longtune.errors import Problem, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as the planner sees it.

    Attributes:
        name: for reports.
        kind: device type, "cpu" or "cuda".
        memory: bytes in all.
        products: floating-point operations per second of matrix products.
        forward, backward: the same of attention.
        bandwidth: bytes per second that element-wise operations read and write.
        link: bytes per second to and from the host.
        launch: seconds that one operation costs the host.
        attention: name of the attention kernel.
        source: where the rates come from: measured, or estimated.
    """

    name: str
    kind: str
    memory: int
    products: float
    forward: float
    backward: float
    bandwidth: float
    link: float
    launch: float
    attention: str
    source: str


_GIB = 1 << 30
_T = 1e12
_G = 1e9


def _card(
    name: str, gib: float, products: float, forward: float, backward: float, bandwidth: float, link: float, kernel: str
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        memory=int(gib * _GIB),
        products=products * _T,
        forward=forward * _T,
        backward=backward * _T,
        bandwidth=bandwidth * _G,
        link=link * _G,
        launch=33.5e-6,
        attention=kernel,
        source="estimated from public peak figures",
    )


# Dense bf16 peaks, memory bandwidths and PCIe generations are the makers' own; of the peaks, 70% are taken for matrix
# products, 55% and 40% for attention with FlashAttention-2 (65% and 50% with cuDNN on Hopper), of the bandwidths 75%.
_KNOWN: dict[str, Device] = {
    "h200": replace(
        _card("h200", 139.8, 760, 565, 520, 3200, 50, "cudnn"), source="measured on one H200 (docs/memory.md)"
    ),
    "h100": _card("h100", 79.6, 620, 590, 470, 2500, 50, "cudnn"),
    "a100": _card("a100", 79.3, 218, 171, 125, 1500, 22, "cuda-flash"),
    "a100-40gb": _card("a100-40gb", 39.4, 218, 171, 125, 1150, 22, "cuda-flash"),
    "l40s": _card("l40s", 44.5, 250, 150, 110, 640, 22, "cuda-flash"),
    "rtx5090": _card("rtx5090", 31.4, 146, 115, 84, 1340, 45, "cuda-flash"),
    "rtx4090": _card("rtx4090", 23.5, 115, 91, 66, 750, 22, "cuda-flash"),
    "rtx3090": _card("rtx3090", 23.5, 50, 39, 28, 700, 22, "cuda-flash"),
    "l4": _card("l4", 22.0, 60, 50, 36, 225, 22, "cuda-flash"),
    "rtx4060ti-16gb": _card("rtx4060ti-16gb", 15.6, 31, 24, 18, 215, 11, "cuda-flash"),
    "t4": _card("t4", 14.6, 25, 6, 5, 240, 11, "reference"),
}


def known(name: str) -> Device:
    """A device by name.

    Raises:
        UserError: no such device is known.
    """
    key = name.lower().replace(" ", "").replace("_", "-")
    if key not in _KNOWN:
        raise UserError(Problem("device", f"{name!r} is not known", f"use one of {', '.join(_KNOWN)}"))
    return _KNOWN[key]


def names() -> list[str]:
    """The devices that `known` knows."""
    return list(_KNOWN)


# What a model's operations reach of the rates of the plainest ones, on CUDA: products of uneven shapes; strided and
# mixed elementwise operations; an operation with its module, adapter and autograd in Python instead of a bare one.
# Fitted to steps of three models on one H200 (bench/results/README.md). A host that is busy with other work launches
# more slowly, by up to two thirds, and not always by the same.
_PRODUCTS, _BANDWIDTH, _LAUNCH = 0.95, 0.54, 4.8
_CPU_LAUNCH = 30.0
"""The same on a CPU, where a bare operation costs 1 us: also what the many small products of a short row take beyond
their arithmetic (SmolLM2 at 38 and 512 tokens)."""


def measure(device: torch.device, dtype: torch.dtype, *, heads: int = 8, key_heads: int = 8, width: int = 64) -> Device:
    """A device that is present: its rates, measured in a fraction of a second.

    Args:
        dtype: of the computation.
        heads, key_heads, width: the attention's shape.
    """
    choice = choose(device, dtype)
    cuda = device.type == "cuda"
    size = 4096 if cuda else 512
    rows = torch.randn(size, size, device=device).to(dtype)
    seconds = _seconds(lambda: rows @ rows, device)
    products = (_PRODUCTS if cuda else 1.0) * 2.0 * size**3 / seconds
    wide = torch.randn(1 << (26 if cuda else 22), device=device).to(dtype)
    bandwidth = 3.0 * wide.numel() * wide.element_size() / _seconds(lambda: wide + wide, device)
    bandwidth *= _BANDWIDTH if cuda else 1.0
    forward, backward = _attention(device, dtype, choice, heads, key_heads, width)
    small = torch.ones(8, device=device)
    # Many short rounds: the best of few is what others on the host leave of it.
    launch = _seconds(lambda: [small + small for _ in range(32)], device, rounds=12) / 32
    launch *= _LAUNCH if cuda else _CPU_LAUNCH
    return Device(
        name=torch.cuda.get_device_name(device) if cuda else device.type,
        kind=device.type,
        memory=total_memory(device),
        products=products,
        forward=forward,
        backward=backward,
        bandwidth=bandwidth,
        link=_link(device) if cuda else bandwidth / 2,
        launch=launch,
        attention=choice.name,
        source="measured",
    )


def measured(device: torch.device, dtype: torch.dtype, config: Any) -> Device:
    """`measure` with the attention of a model's configuration; once in a process, as a device doesn't change."""
    text = config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 8) or 8)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return _once(device, dtype, heads, key_heads if heads % key_heads == 0 else heads, width)


@functools.lru_cache(maxsize=8)
def _once(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> Device:
    return measure(device, dtype, heads=heads, key_heads=key_heads, width=width)


def _attention(
    device: torch.device, dtype: torch.dtype, choice: Choice, heads: int, key_heads: int, width: int
) -> tuple[float, float]:
    """Rates of the chosen kernel: over a square of past keys on a GPU, as most of a long row is, or a causal one."""
    from longtune.attention.select import KERNELS

    kernel = KERNELS[choice.name]()
    cuda = device.type == "cuda"
    size = 8192 if cuda else 256
    q = torch.randn(1, heads, size, width, device=device).to(dtype)
    k = torch.randn(1, key_heads, size, width, device=device).to(dtype)
    run = {"scale": width**-0.5, "causal": not cuda}
    out, lse = kernel.forward(q, k, k, **run)
    pairs = heads * (size * size if cuda else size * (size + 1) / 2) * 2 * width
    forward = 2 * pairs / _seconds(lambda: kernel.forward(q, k, k, **run), device)
    backward = 5 * pairs / _seconds(lambda: kernel.backward(out, q, k, k, out, lse, **run), device)
    return forward, backward


def _link(device: torch.device) -> float:
    here = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=device)
    return here.numel() / _seconds(lambda: there.copy_(here, non_blocking=True), device)


def _seconds(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """Seconds of one call: the best of some rounds of 7 ms each."""

    def once(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    once(2)
    first = once(1)
    count = max(1, min(200, int(7e-3 / max(first, 1e-7))))
    return min(first, *(once(count) for _ in range(rounds)))


def total_memory(device: torch.device) -> int:
    """Bytes of a device in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()["total"]


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take; on CUDA, what its allocator holds unused counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_memory()["available"]


def host_memory() -> dict[str, int]:
    """Total and available main memory in bytes, under the process's control group where it has a limit."""
    found = {}
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        found = {
            key: int(lines[name].split()[0]) * 1024
            for key, name in (("total", "MemTotal"), ("available", "MemAvailable"))
        }
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = {"total": total, "available": total // 2}
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        found["total"] = min(found["total"], int(text))
        found["available"] = min(found["available"], max(0, int(text) - int(used.read_text())))
    return found


def resident() -> int:
    """Bytes of this process in main memory; 0 where the system doesn't say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
