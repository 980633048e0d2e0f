"""Randomness inside a cell as a function of what the cell is, so that a recomputed cell repeats it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def has_dropout(modules: Iterable[nn.Module]) -> bool:
    """Whether any dropout among them is active."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in modules)


@contextmanager
def cell_randomness(device: torch.device, *key: int) -> Iterator[None]:
    """Seed the device's generator from `key` for the duration, and leave it afterwards as it was before.

    Args:
        key: (run seed, step, micro-batch, layer, chunk); modules within a layer draw one after another.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    elif device.type == "mps":
        generator = torch.mps._get_default_mps_generator()
    else:
        generator = torch.default_generator
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(state)
