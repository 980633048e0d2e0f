"""Whether this room's Triton kernels run on a device."""

from __future__ import annotations

from functools import cache

import torch

from longtune.fallback import fault_of


@cache
def triton_fault(device: torch.device) -> str | None:
    """Why the kernels of `lora_kernels` and `packed` can't run on a CUDA device, or None where they do."""

    def try_one() -> None:
        from longtune.model import lora_kernels

        lora_kernels.probe(device)

    return fault_of(try_one)
