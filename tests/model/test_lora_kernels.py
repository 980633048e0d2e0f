"""The Triton kernels of LoRA's skinny products against fp64, in triton's interpreter where there is no CUDA."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from torch import nn

from longtune.model import lora
from longtune.model.lora import LeanLinear
from longtune.model.lora_kernels import expand, up_gradients
from tests.model.test_lora import adapted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (7, 5, 3), (64, 256, 16), (300, 257, 9), (65, 700, 16)]
"""Tokens, outputs, rank: one of each, odd ones, one whole tile, several."""
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def tensors(N: int, O: int, R: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy, B and the middle one of three low, which lie side by side."""
    generator = torch.Generator().manual_seed(N + O)
    dy, up, lows = (torch.randn(*shape, generator=generator) for shape in ((N, O), (O, R), (N, 3 * R)))
    dy, up, lows = (x.to(DEVICE, dtype) for x in (dy, up, lows))
    return dy, up, lows.split(R, 1)[1]


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    scale = exact.abs().max()
    assert ours.isfinite().all()
    assert (ours.double() - exact).abs().max() <= TOLERANCE[dtype] * scale


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_those_in_fp64(shape, dtype):
    dy, up, low = tensors(*shape, dtype)
    y = expand(low, up)
    assert y.dtype == dtype and y.is_contiguous()
    close(y, low.double() @ up.double().t(), dtype)
    dlow, dup = up_gradients(dy, up, low)
    assert dlow.dtype == dup.dtype == torch.float32
    close(dlow, dy.double() @ up.double(), dtype)
    close(dup, dy.double().t() @ low.double(), dtype)


def test_the_same_inputs_give_the_same_bits():
    dy, up, low = tensors(300, 257, 9, torch.float16)
    first, second = up_gradients(dy, up, low), up_gradients(dy, up, low)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Two(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.a, self.b = nn.Linear(20, 34, bias=bias), nn.Linear(20, 18, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)[:, :18] * self.b(x)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_gives_the_same_with_them(bias, monkeypatch):
    taken = []

    def everything(rows: torch.Tensor, up: torch.Tensor) -> bool:
        taken.append(rows)
        return True

    def run(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(37, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        found = [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
        model.zero_grad()
        return found

    model = adapted(Two(bias)).to(DEVICE, torch.float32)
    assert any(isinstance(m, LeanLinear) for m in model.modules())
    expected = run(model)
    monkeypatch.setattr(lora, "_kernels_take", everything)
    found = run(model)
    assert len(taken) == (2 if bias else 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA: sizes of real models")
@pytest.mark.parametrize("compiled", [False, True])
def test_wide_linears_on_the_card(compiled):
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = nn.Sequential(nn.Linear(256, 8192, bias=False), nn.Linear(8192, 64, bias=False))
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    def run(dtype: torch.dtype, fast: bool) -> list[torch.Tensor]:
        config = LoraConfig(r=16, lora_alpha=16, target_modules=["0", "1"], init_lora_weights=False)
        torch.manual_seed(1)
        model = LoraModel(base, lora.use_lean_layers(config, base), "default").to("cuda", dtype)
        x = torch.randn(4100, 256, generator=torch.Generator().manual_seed(2)).to("cuda", dtype).requires_grad_()
        y = (torch.compile(model) if fast and compiled else model)(x)
        y.float().square().mean().backward()
        found = [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
        model.unload()
        return [x.double() for x in found]

    exact, ours = run(torch.float64, False), run(torch.bfloat16, True)
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


def test_other_shapes_dtypes_and_devices_are_left_to_the_library():
    up = torch.zeros(lora._WIDE, 16, dtype=torch.bfloat16)
    assert not lora._kernels_take(torch.zeros(lora._MANY, 4, dtype=torch.bfloat16), up)
    if DEVICE == "cuda":
        rows, up = torch.zeros(lora._MANY, 16, dtype=torch.bfloat16, device=DEVICE), up.to(DEVICE)
        assert lora._kernels_take(rows, up)
        assert not lora._kernels_take(rows[1:], up) and not lora._kernels_take(rows, up[1:])
        assert not lora._kernels_take(rows.float(), up) and not lora._kernels_take(
            rows.new_zeros(16, lora._MANY).t(), up
        )
