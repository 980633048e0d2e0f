"""Sums of parameter gradients over the cells of a step, in fp32 (fp64 for fp64 parameters)."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class GradientSums:
    """Adds gradients by parameter; `deliver` adds the sums to `.grad`."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
        """Add one gradient for each parameter; None is nothing."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            entry = self._sums.get(id(parameter))
            if entry is None:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._sums[id(parameter)] = (parameter, gradient.to(wide, copy=True))
            else:
                entry[1].add_(gradient)

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The sum for a parameter, in the sums' dtype."""
        entry = self._sums.get(id(parameter))
        return None if entry is None else entry[1]

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all sums."""
        for _, total in self._sums.values():
            total.mul_(factor)

    def deliver(self) -> None:
        """Add every sum to its parameter's `.grad`."""
        for parameter, total in self._sums.values():
            if parameter.grad is None:
                parameter.grad = total.to(parameter.dtype)
            else:
                parameter.grad.add_(total.to(parameter.grad.dtype))
        self._sums.clear()
