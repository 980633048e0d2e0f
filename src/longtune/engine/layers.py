"""What a walk must know of the modules inside each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from longtune.engine.randomness import has_dropout
from longtune.model.members import modules_of, parameters_of


class Members(NamedTuple):
    """Of one layer: whether something in it is random, and its trainable parameters."""

    random: bool
    trained: list[nn.Parameter]


class Layers:
    """The members of each layer as they are when they are first asked for.

    A walk asks as it comes to a layer: looking through all of them before its first kernel would leave the device
    without work for a good part of a short step.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self._layers = layers
        self._known: dict[int, Members] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> Members:
        if index not in self._known:
            if not 0 <= index < len(self._layers):
                raise IndexError(index)
            modules = modules_of(self._layers[index])
            trained = [p for p in parameters_of(*modules) if p.requires_grad]
            self._known[index] = Members(has_dropout(modules), trained)
        return self._known[index]

    @property
    def changed(self) -> bool:
        """Whether a layer that was asked for is random now and wasn't, or the other way round."""
        return any(m.random != has_dropout(modules_of(self._layers[i])) for i, m in self._known.items())
