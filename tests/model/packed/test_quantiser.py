"""Packing weights: MLX's rule, and never a larger error than MLX's."""

from __future__ import annotations

import pytest
import torch

from longtune.model.packed.formats import AFFINE_BITS, Format, float_format
from longtune.model.packed.modules import PackedWeight
from longtune.model.packed.quantiser import quantise
from tests.model.packed.support import torch_of


def weights(rows: int = 6, columns: int = 256) -> torch.Tensor:
    """Rows of both signs, all positive, all negative, zero, constant, and with an outlier."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[0].abs_()
    weight[1] = -weight[1].abs()
    weight[2, :128] = 0
    weight[3] = 0.5
    weight[4, 7] = 40.0
    return weight


def read(format: Format, made, columns: int = 256) -> torch.Tensor:
    packed = PackedWeight(format, columns, made.weight, made.scales, made.biases, compute_dtype=torch.float32)
    return packed.dequantise()


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_affine_packs_as_mlx_does(bits, group):
    mx = pytest.importorskip("mlx.core", reason="mlx is the oracle")
    weight, format = weights(), Format("affine", bits, group)
    ours = quantise(weight, format)
    words, scales, biases = mx.quantize(mx.array(weight.numpy()), group_size=group, bits=bits)
    theirs = torch_of(mx.dequantize(words, scales, biases, group_size=group, bits=bits))
    if bits == 1:
        # MLX has another rule there, with more error.
        assert (read(format, ours) - weight).square().sum() <= (theirs - weight).square().sum()
        return
    assert torch.equal(ours.weight, torch_of(words).view(torch.int32))
    assert torch.equal(ours.scales, torch_of(scales)) and torch.equal(ours.biases, torch_of(biases))


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_scales_in_half_precision_cost_no_more_than_with_mlx(bits):
    mx = pytest.importorskip("mlx.core", reason="mlx is the oracle")
    weight, format = weights().bfloat16(), Format("affine", bits, 64)
    ours = quantise(weight, format)
    assert ours.scales.dtype == torch.bfloat16
    words, scales, biases = mx.quantize(mx.array(weight.float().numpy()).astype(mx.bfloat16), group_size=64, bits=bits)
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    theirs = torch_of(mx.dequantize(words, *wide, group_size=64, bits=bits))
    error = lambda made: (made - weight.float()).square().sum()  # noqa: E731
    assert error(read(format, ours)) <= error(theirs)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_float_modes_cost_no_more_than_with_mlx(mode):
    mx = pytest.importorskip("mlx.core", reason="mlx is the oracle")
    weight, format = weights(), float_format(mode)
    theirs = torch_of(mx.dequantize(*mx.quantize(mx.array(weight.numpy()), mode=mode), mode=mode, dtype=mx.float32))
    ours = read(format, quantise(weight, format))
    assert (ours - weight).square().sum() <= (theirs - weight).square().sum()


def test_a_global_scale_reaches_rows_of_any_size():
    weight = weights() * 1e-4
    format = float_format("nvfp4")
    shared = weight.abs().max().float()
    made = quantise(weight, format, global_scale=shared)
    packed = PackedWeight(format, 256, made.weight, made.scales, None, shared, compute_dtype=torch.float32)
    assert (packed.dequantise() - weight).norm() < 0.12 * weight.norm()


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_no_number_is_farther_off_than_a_step(bits):
    format, weight = Format("affine", bits, 32), weights()
    made = quantise(weight, format)
    steps = made.scales.abs().repeat_interleave(32, 1)
    assert bool(((read(format, made) - weight).abs() <= steps * 1.001 + 1e-6).all())


def test_experts_are_packed_matrix_by_matrix():
    weight = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    format = Format("affine", 4, 32)
    whole = quantise(weight, format)
    assert whole.weight.shape == (3, 4, 8) and whole.scales.shape == (3, 4, 2)
    for expert in range(3):
        assert torch.equal(whole.weight[expert], quantise(weight[expert], format).weight)


def test_scales_below_the_smallest_of_their_dtype_give_the_bias():
    weight = torch.full((1, 32), 3e-9).half()
    made = quantise(weight, Format("affine", 4, 32))
    assert bool(made.scales.isfinite().all()) and bool(read(Format("affine", 4, 32), made, 32).isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    weight = weights()
    weight[3, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantise(weight, Format("affine", 4, 32))
