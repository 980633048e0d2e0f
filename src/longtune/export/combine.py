"""Updates made into other updates that compute the same: concatenated, of even ranks, of one scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from longtune.model.adapter_files import Update

Named = Mapping[str, Update]
"""Updates by the model's module names."""


def combined(parts: Sequence[tuple[Named, float]]) -> dict[str, Update]:
    """The weighted sum of adapters as one: the rows of all A on top of each other, the columns of all B side by side.

    Ranks add up. A module keeps the scale of the first part that has it; the others' B take up weight and scale, so
    that equal scales and weights of 1 change no number.

    Args:
        parts: each adapter with its weight.
    """
    found: dict[str, list[tuple[Update, float]]] = {}
    for updates, weight in parts:
        for name, update in updates.items():
            found.setdefault(name, []).append((update, weight))
    whole: dict[str, Update] = {}
    for name, terms in found.items():
        scale = terms[0][0].scale
        ups = [_times(update.up_OR, weight * update.scale / scale) for update, weight in terms]
        downs = [update.down_RI for update, _ in terms]
        wide = torch.promote_types(*(_widest(tensors) for tensors in (downs, ups)))
        down_RI, up_OR = torch.cat([x.to(wide) for x in downs], dim=-2), torch.cat([x.to(wide) for x in ups], dim=-1)
        whole[name] = Update(down_RI, up_OR, scale)
    return whole


def even(updates: Named) -> dict[str, Update]:
    """The same updates, padded with zeros to the largest rank."""
    rank = max(update.rank for update in updates.values())
    return {name: _padded(update, rank) for name, update in updates.items()}


def of_one_scale(updates: Named) -> dict[str, Update]:
    """The same updates with the commonest scale for all; the B of the others take up the rest."""
    scale = commonest([update.scale for update in updates.values()])
    return {
        name: Update(update.down_RI, _times(update.up_OR, update.scale / scale), scale)
        for name, update in updates.items()
    }


def commonest(values: Sequence[float]) -> float:
    """The value that occurs most often; of several the first."""
    return Counter(values).most_common(1)[0][0]


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else (tensor.float() if tensor.itemsize < 4 else tensor) * factor


def _padded(update: Update, rank: int) -> Update:
    more = rank - update.rank
    if more == 0:
        return update
    down, up = update.down_RI, update.up_OR
    return Update(
        F.pad(down, (0, 0, 0, more)),
        F.pad(up, (0, more)),
        update.scale,
    )


def _widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    wide = tensors[0].dtype
    for tensor in tensors[1:]:
        wide = torch.promote_types(wide, tensor.dtype)
    return wide
