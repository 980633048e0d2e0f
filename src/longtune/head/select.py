"""Which loss head a device and dtype get, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from longtune.fallback import fault_of


@dataclass(frozen=True, slots=True)
class Choice:
    """A head by name and the reason for it."""

    name: str
    reason: str


def choose(device: torch.device, dtype: torch.dtype) -> Choice:
    """ "online" or "chunked" for a device and dtype, with the reason."""
    if device.type != "cuda":
        return Choice("chunked", f"the online head needs CUDA, not {device.type}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return Choice("chunked", f"the online head takes bf16, fp16 and fp32, not {dtype}")
    if fault := triton_fault(device):
        return Choice("chunked", fault)
    return Choice(
        "online", "one pass over slices of the vocabulary, logits in place, by triton; fused where it is trained"
    )


@cache
def triton_fault(device: torch.device) -> str | None:
    """Why the kernel can't run on a CUDA device, or None where it does: it is tried."""

    def try_one() -> None:
        from longtune.head import triton_logits

        triton_logits.probe(device)

    return fault_of(try_one)
