"""Rotary embeddings that depend on the length of the row (dynamic NTK, LongRoPE).

transformers chooses their frequencies by the largest position of the call. A chunk's own largest position is not the
row's, so while a row is walked these modules are told the row's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map


class LengthDependentRope:
    """The rotary modules of a decoder whose frequencies depend on the row's length.

    Args:
        decoder: a transformers base model.
    """

    def __init__(self, decoder: nn.Module):
        self._modules: list[Any] = []
        self._thresholds: list[tuple[str, int]] = []
        for module in decoder.modules():
            kinds = getattr(module, "rope_type", None)
            if kinds is None:
                continue
            named = kinds if isinstance(kinds, dict) else {None: kinds}
            moving = {layer: kind for layer, kind in named.items() if "dynamic" in str(kind) or kind == "longrope"}
            if not moving:
                continue
            self._modules.append(module)
            config = cast(Any, module).config
            for layer, kind in moving.items():
                parameters = config.rope_parameters if layer is None else config.rope_parameters[layer]
                longest = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
                self._thresholds.append((kind, int(longest)))

    def __bool__(self) -> bool:
        return bool(self._modules)

    def regime(self, length: int) -> tuple[int, ...]:
        """Rows of equal regimes have equal frequencies."""
        return tuple(
            int(length > longest) if kind == "longrope" else max(length, longest) for kind, longest in self._thresholds
        )

    @contextmanager
    def row(self, last_position: int) -> Iterator[None]:
        """While open, the modules choose their frequencies for a row that ends at `last_position`."""
        with ExitStack() as stack:
            for module in self._modules:
                original = module.forward
                module.forward = _told(original, last_position)
                stack.callback(_restore, module, original)
            yield


def _told(original: Any, last_position: int) -> Any:
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        last = torch.full_like(position_ids[..., :1], last_position)
        found = original(x, torch.cat([position_ids, last], -1), *args, **kwargs)
        return tree_map(lambda t: t[..., :-1, :], found)

    return forward


def _restore(module: Any, original: Any) -> None:
    if getattr(original, "__func__", None) is type(module).forward:
        del module.forward
    else:
        module.forward = original
