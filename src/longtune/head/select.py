"""Which loss head a device and dtype get, and why."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """A head by name and the reason for it."""

    name: str
    reason: str


def choose(device: torch.device, dtype: torch.dtype) -> Choice:
    """ "fused" or "chunked" for a device and dtype, with the reason."""
    if device.type != "cuda":
        return Choice("chunked", f"the fused head needs CUDA, not {device.type}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return Choice("chunked", f"the fused head takes bf16, fp16 and fp32, not {dtype}")
    if importlib.util.find_spec("triton") is None:
        return Choice("chunked", "triton is not installed")
    if torch.cuda.get_device_capability(device)[0] < 7:
        return Choice("chunked", "triton needs compute capability 7")
    return Choice("fused", "one pass over the logits in place, by triton")
