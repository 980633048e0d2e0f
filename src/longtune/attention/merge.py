"""The parts of an attention merged by log-sum-exp: softmax over the union of disjoint key sets from softmax over each.

A sum over many parts is kept in fp32 (fp64) and rounded once. Written with torch's operations, and as one pass of a
Triton kernel.

Shapes: B = 1, H query heads, S queries, E value width.
"""

from __future__ import annotations

from typing import Protocol

import torch

FEW = 1 << 18
"""Numbers of an output that aren't worth a kernel's compilation: an engine's own trials have six tokens."""


class Merge(Protocol):
    """Merges two parts.

    Args:
        out_BHSE, lse_BHS: output and log-sum-exp of one part; may be overwritten where they are as wide as a sum.
        part_BHSE, part_lse_BHS: of the other.
        last: no part follows, so the output is wanted as narrow as `part_BHSE` is.

    Returns:
        Output and log-sum-exp over both.
    """

    def __call__(
        self,
        out_BHSE: torch.Tensor,
        lse_BHS: torch.Tensor,
        part_BHSE: torch.Tensor,
        part_lse_BHS: torch.Tensor,
        *,
        last: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def merge(
    out_BHSE: torch.Tensor, lse_BHS: torch.Tensor, part_BHSE: torch.Tensor, part_lse_BHS: torch.Tensor, *, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """By torch's operations."""
    total = torch.logaddexp(lse_BHS, part_lse_BHS)
    out = out_BHSE.to(_wide(part_BHSE))
    out.mul_(torch.exp(lse_BHS - total)[..., None]).addcmul_(part_BHSE, torch.exp(part_lse_BHS - total)[..., None])
    return out.to(part_BHSE.dtype) if last else out, total


def fuses(part_BHSE: torch.Tensor) -> bool:
    """Whether `merge_fused` runs its kernel on such a part."""
    return part_BHSE.numel() >= FEW and part_BHSE.dtype != torch.float64


def room(out_BHSE: torch.Tensor, part_BHSE: torch.Tensor, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Where `merge_fused` writes output and log-sum-exp: over the output that it is given, if that is as wide."""
    _, H, S, E = part_BHSE.shape
    dtype = part_BHSE.dtype if last else _wide(part_BHSE)
    if out_BHSE.dtype == dtype:
        made = out_BHSE
    else:
        # Token-major, as transformers wants it next.
        made = part_BHSE.new_empty(1, S, H, E, dtype=dtype).transpose(1, 2)
    return made, part_BHSE.new_empty(1, H, S, dtype=torch.float32)


def merge_fused(
    out_BHSE: torch.Tensor, lse_BHS: torch.Tensor, part_BHSE: torch.Tensor, part_lse_BHS: torch.Tensor, *, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """By one Triton kernel, where it can: each number is read once and written once."""
    if not fuses(part_BHSE):
        return merge(out_BHSE, lse_BHS, part_BHSE, part_lse_BHS, last=last)
    from longtune.attention.triton_kernels import launch, merge_kernel

    made, total = room(out_BHSE, part_BHSE, last)
    _, H, S, E = part_BHSE.shape
    block = max(16, 1 << (E - 1).bit_length())
    rows = 4096 // block
    launch(
        merge_kernel,
        (-(-S * H // rows),),
        out_BHSE,
        lse_BHS,
        part_BHSE,
        part_lse_BHS,
        made,
        total,
        S * H,
        H,
        *out_BHSE.stride()[1:],
        *lse_BHS.stride()[1:],
        *part_BHSE.stride()[1:],
        *part_lse_BHS.stride()[1:],
        *made.stride()[1:],
        *total.stride()[1:],
        WIDTH=E,
        BLOCK_R=rows,
        BLOCK_E=block,
    )
    return made, total


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
