"""In bf16 the walk is no further from the fp32 truth than plain bf16 autograd is (STYLE: an error budget)."""

from __future__ import annotations

import pytest
import torch

from longtune.attention.select import KERNELS
from longtune.engine import Engine, Plan
from longtune.tree import Forest
from tests import support

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPE = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=64, num_hidden_layers=4)
SEEDS = 12


def kernels(device: str) -> list[str]:
    if device == "cpu":
        return ["cpu-flash", "reference"]
    names = ["cuda-flash", "reference"]
    return [*names, "cudnn"] if torch.cuda.get_device_capability()[0] >= 9 else names


def error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Relative error over all gradients together."""
    wrong = sum(float((found[n].double().cpu() - truth[n].double()).square().sum()) for n in truth)
    return (wrong / sum(float(t.double().square().sum()) for t in truth.values())) ** 0.5


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_error_is_within_that_of_plain_bf16(device, name):
    assert set(kernels(device)) <= set(KERNELS)
    plain_errors: list[float] = []
    walk_errors: dict[tuple[str, object], list[float]] = {}
    for seed in range(SEEDS):
        half = support.with_lora(support.tiny_model(name, torch.bfloat16, seed=seed, **SHAPE), seed=seed)
        full = support.clone(half).float()
        forest = Forest([support.random_sequence(100, seed=seed)])
        cotangent = -forest.targets.weight / forest.targets.weight.sum()
        truth = support.oracle_gradients(full, forest, cotangent)
        half.to(device)
        plain_errors.append(error(support.oracle_gradients(half, forest, cotangent), truth))
        for kernel in kernels(device):
            engine = Engine(half, attention=kernel)
            for plan in (Plan(), Plan(chunk_tokens=64, boundary_store="host"), Plan(chunk_tokens=40, keep="attention")):
                engine.set_plan(plan)
                walk = engine.walk(forest, (0, 0), grad=True)
                walk.forward()
                walk.head(cotangent)
                walk.backward()
                walk.sums.deliver()
                found = error(support.gradients(half), truth)
                half.zero_grad()
                walk_errors.setdefault((kernel, plan.chunk_tokens), []).append(found)
            engine.close()
    plain = sum(plain_errors) / len(plain_errors)
    assert plain > 0
    for way, errors in walk_errors.items():
        assert sum(errors) / len(errors) <= 1.05 * plain, (way, errors, plain_errors)
