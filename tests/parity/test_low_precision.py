"""In bf16 the walk is no further from the fp32 truth than plain bf16 autograd is: an error budget, not a tolerance.

Single seeds scatter by a fifth either way, so the budget holds for the mean over seeds.
"""

from __future__ import annotations

import pytest
import torch

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.tree import Forest
from tests import support

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPE = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=64, num_hidden_layers=4)
SEEDS = 30
PLANS = (Plan(), Plan(chunk_tokens=64, boundary_store="host"), Plan(chunk_tokens=40, keep="attention"))


def kernels(device: str) -> list[str]:
    if device == "cpu":
        return ["cpu-flash"]
    names = ["cuda-flash", "reference"]
    return [*names, "cudnn"] if torch.cuda.get_device_capability()[0] >= 9 else names


def error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Relative error over all gradients together."""
    wrong = sum(float((found[n].double().cpu() - truth[n].double()).square().sum()) for n in truth)
    return (wrong / sum(float(t.double().square().sum()) for t in truth.values())) ** 0.5


def bf16_model(name: str, seed: int) -> torch.nn.Module:
    """A bf16 base with the adapter that longtune trains: fp32 masters, computed in bf16."""
    model = add_lora(support.tiny_model(name, torch.bfloat16, seed=seed, **SHAPE), rank=3, alpha=6, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                assert parameter.dtype == torch.float32
                # Values that bf16 holds exactly, so that the truth has the very same adapter.
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
                parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_error_is_within_that_of_plain_bf16(device, name):
    plain_errors: list[float] = []
    walk_errors: dict[tuple[str, object], list[float]] = {}
    for seed in range(SEEDS):
        half = bf16_model(name, seed)
        full = support.clone(half).float()
        forest = Forest([support.random_sequence(80, seed=seed)])
        cotangent = -forest.targets.weight / forest.targets.weight.sum()
        truth = support.oracle_gradients(full, forest, cotangent)
        half.to(device)
        plain_errors.append(error(support.oracle_gradients(half, forest, cotangent), truth))
        for kernel in kernels(device):
            engine = Engine(half, attention=kernel)
            for plan in PLANS:
                engine.set_plan(plan)
                found = error(support.walk_gradients(engine, forest, cotangent), truth)
                walk_errors.setdefault((kernel, plan.chunk_tokens), []).append(found)
            engine.close()
    plain = sum(plain_errors) / SEEDS
    ratios = {way: sum(errors) / SEEDS / plain for way, errors in walk_errors.items()}
    print(f"{name} on {device}: plain bf16 {plain:.4f}, walk / plain {ratios}")
    assert plain > 0
    assert all(ratio <= 1.05 for ratio in ratios.values()), ratios
