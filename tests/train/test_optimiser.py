"""AdamW's groups and the gradient norm."""

from __future__ import annotations

import pytest
import torch

from longtune.config import TrainConfig
from longtune.train import optimiser


@pytest.fixture
def parameters():
    first, second = (torch.nn.Parameter(torch.ones(size)) for size in (3, 2))
    first.grad, second.grad = torch.full((3,), 2.0), torch.full((2,), -1.0)
    return first, second


def build(parameters, **settings):
    groups = [{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.4}]
    return optimiser.build(groups, TrainConfig(learning_rate=0.1, **settings))


def test_the_reported_norm_is_the_one_before_clipping(parameters):
    norm = optimiser.clip(build(parameters), 1.0)
    assert norm == pytest.approx(14**0.5)
    clipped = torch.cat([p.grad for p in parameters])
    assert torch.linalg.vector_norm(clipped) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("clip_norm", [0.0, 100.0])
def test_zero_is_off_and_a_small_norm_is_left_alone(parameters, clip_norm):
    optimiser.clip(build(parameters), clip_norm)
    assert parameters[0].grad.tolist() == [2.0] * 3


def test_an_infinite_norm_is_reported(parameters):
    parameters[0].grad[0] = float("inf")
    assert optimiser.clip(build(parameters), 1.0) == float("inf")


def test_every_group_keeps_its_ratio_under_the_schedule(parameters):
    adamw = build(parameters)
    for factor in (0.5, 1.0, 0.1):
        optimiser.set_rates(adamw, factor)
        assert [group["lr"] for group in adamw.param_groups] == pytest.approx([0.1 * factor, 0.4 * factor])


def test_the_settings_reach_adamw(parameters):
    group = build(parameters, betas=(0.8, 0.95), eps=1e-6).param_groups[0]
    assert group["betas"] == (0.8, 0.95)
    assert group["eps"] == 1e-6
