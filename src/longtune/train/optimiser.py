"""AdamW over the trainable parameters, and the global gradient norm."""

from __future__ import annotations

from typing import Any

import torch

from longtune.config import TrainConfig


def build(groups: list[dict[str, Any]], train: TrainConfig) -> torch.optim.AdamW:
    """AdamW with bias correction and decoupled decay.

    Args:
        groups: parameter groups; a group's own `lr` (LoRA+) is its highest rate.
    """
    optimiser = torch.optim.AdamW(groups, lr=train.learning_rate or 0.0, betas=train.betas, eps=train.eps)
    for group in optimiser.param_groups:
        group["highest_lr"] = group["lr"]
    return optimiser


def set_rates(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's learning rate to `factor` times its highest."""
    for group in optimiser.param_groups:
        group["lr"] = group["highest_lr"] * factor


def clip(optimiser: torch.optim.Optimizer, clip_norm: float) -> float:
    """Clips all gradients to a global L2 norm (0: off); returns the norm before clipping."""
    parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if clip_norm and torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return float(norm)
