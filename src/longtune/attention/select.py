"""Which attention kernel a device and dtype get, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from longtune.attention.kernels import CpuFlash, CudaEfficient, CudaFlash, Cudnn, Reference
from longtune.attention.merge import merge, merge_fused
from longtune.attention.path import PathAttention, PathKernel
from longtune.attention.triton_path import TritonPath
from longtune.attention.varlen import VarlenFlash
from longtune.fallback import fault_of

KERNELS: dict[str, type] = {
    "reference": Reference,
    "cpu-flash": CpuFlash,
    "cuda-efficient": CudaEfficient,
    "cuda-flash": CudaFlash,
    "cudnn": Cudnn,
    # Whole chunks are computed by `TritonPath`; what it can't take, explicitly.
    "triton": Reference,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel by name and the reason for it."""

    name: str
    reason: str


def choose(device: torch.device, dtype: torch.dtype) -> Choice:
    """The kernel for a device and dtype, with the reason."""
    if device.type == "cuda":
        if dtype == torch.float32 and torch.cuda.get_device_capability(device)[0] >= 8:
            return Choice("cuda-efficient", "memory-efficient attention of torch, the fused one that takes fp32")
        if dtype not in (torch.bfloat16, torch.float16):
            return Choice("reference", f"no fused CUDA kernel takes {dtype} here")
        if torch.cuda.get_device_capability(device)[0] >= 9 and torch.backends.cudnn.is_available():
            return Choice("cudnn", "fastest of torch's own kernels on compute capability 9 and newer")
        if torch.cuda.get_device_capability(device)[0] >= 8:
            return Choice("cuda-flash", "FlashAttention-2 of torch, compute capability 8")
        return Choice("reference", "torch's flash attention needs compute capability 8")
    if device.type == "cpu":
        if dtype == torch.float16:
            return Choice("reference", "fp16 on the CPU is computed with explicit scores")
        return Choice("cpu-flash", "torch's flash attention for the CPU")
    return Choice("reference", f"no fused kernel with log-sum-exp on {device.type}")


def path_attention(device: torch.device, dtype: torch.dtype, name: str | None = None) -> tuple[PathAttention, Choice]:
    """The attention for a device and dtype; `name` overrules the choice."""
    choice = Choice(name, "asked for") if name else choose(device, dtype)
    paths = [kernel for kernel, _ in path_kernels(device, dtype, choice.name)]
    merged = merge_fused if fuses_merging(device) else merge
    return PathAttention(KERNELS[choice.name](), Reference(), paths=paths, merge=merged), choice


def fuses_merging(device: torch.device) -> bool:
    """Whether the blocks of a forward are merged by Triton's kernel."""
    return device.type == "cuda" and triton_fault(device) is None


def path_kernels(device: torch.device, dtype: torch.dtype, name: str) -> list[tuple[PathKernel, str]]:
    """The kernels that compute some chunks as a whole, beside the block kernel of a name, each with what it is for, in
    the order in which they are asked."""
    if name == "triton":
        return [(TritonPath(always=True), "every chunk")]
    if device.type != "cuda":
        return []
    return cuda_path_kernels(name, triton_fault(device) is None)


def cuda_path_kernels(name: str, triton: bool) -> list[tuple[PathKernel, str]]:
    """`path_kernels` of a CUDA device, where triton's kernels run or don't."""
    if name == "cuda-efficient":
        # fp32, which FlashAttention-2 doesn't take.
        return [(TritonPath(windows=True), "softcap, sliding windows and packed short rows")] if triton else []
    if name not in ("cuda-flash", "cudnn"):
        return []
    found: list[tuple[PathKernel, str]] = []
    if triton:
        # Where cuDNN doesn't apply, Triton's tiles are faster than FlashAttention-2 on compute capability 9.
        grain = Cudnn().grain if name == "cudnn" else None
        use = "softcap and packed short rows" + (f", and lengths that are no multiple of {grain}" if grain else "")
        found.append((TritonPath(grain=grain), use))
    found.append((VarlenFlash(), "sliding windows" + ("" if found else " and packed short rows")))
    return found


@cache
def triton_fault(device: torch.device) -> str | None:
    """Why Triton's kernels can't run on a CUDA device, or None where they do: one is tried."""

    def try_one() -> None:
        from longtune.attention import triton_path

        triton_path.probe(device)

    return fault_of(try_one)
