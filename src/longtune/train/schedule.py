"""Learning-rate schedules as pure functions of the step; nothing here holds state, so a resume can't restart one."""

from __future__ import annotations

import math

FLOOR = 0.1
"""Share of the learning rate at which `cosine` ends."""


def warmup_length(steps: int, ratio: float, warmup_steps: int | None) -> int:
    """Steps of warm-up: `warmup_steps` where given, else the ratio's share of all steps, rounded up."""
    return min(warmup_steps if warmup_steps is not None else math.ceil(ratio * steps), steps)


def factor(name: str, step: int, steps: int, warmup: int) -> float:
    """What the learning rate is multiplied by in a step.

    Args:
        name: constant | linear | cosine.
        step: the step about to be taken, from 1 to `steps`.
        steps: steps of the run.
        warmup: steps of the linear rise. None of them has a rate of zero; the full rate follows the last.

    Returns:
        A factor in (0, 1]. `constant` stays 1 after warm-up, `linear` falls towards 0, `cosine` towards FLOOR.
    """
    if step <= warmup:
        return step / (warmup + 1)
    if name == "constant":
        return 1.0
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    if name == "linear":
        return 1.0 - progress
    if name == "cosine":
        return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule: {name}")
