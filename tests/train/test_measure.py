"""Memory of this process as events report it."""

from __future__ import annotations

import sys

import pytest
import torch

from longtune.train import measure

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="a process's peak can be reset on Linux alone")
def test_the_peak_is_that_since_it_was_reset():
    torch.ones(64 << 20, dtype=torch.uint8).sum()
    before = measure.peak_bytes(CPU)
    measure.reset_peak(CPU)
    after = measure.peak_bytes(CPU)
    assert after < before - (32 << 20)
    torch.ones(128 << 20, dtype=torch.uint8).sum()
    assert measure.peak_bytes(CPU) > after + (96 << 20)


def test_the_peak_is_at_least_what_is_in_use():
    assert measure.peak_bytes(CPU) >= measure.active_bytes(CPU) > 0 or sys.platform != "linux"
