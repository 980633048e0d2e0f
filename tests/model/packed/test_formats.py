"""Every width and mode against MLX itself, to the last bit of fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longtune.model.packed.formats import AFFINE_BITS, Format, float_format, pack, scale_table, unpack, value_table
from longtune.model.packed.modules import PackedWeight
from tests.model.packed.support import torch_of

FLOAT_MODES = ["mxfp4", "mxfp8", "nvfp4"]


@pytest.fixture
def mx():
    return pytest.importorskip("mlx.core", reason="mlx is the oracle")


def random_words(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


def numbers(format: Format, columns: int, weight, scales, biases=None, shared=None) -> torch.Tensor:
    tensors = [None if x is None else torch.from_numpy(np.asarray(x)) for x in (weight, scales, biases, shared)]
    return PackedWeight(format, columns, *tensors, compute_dtype=torch.float32).dequantise()


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_affine_equals_mlx(mx, bits, poisoned_empty):
    draw = np.random.default_rng(bits)
    for group, rows, columns in ((32, 1, 32), (32, 5, 416), (64, 3, 192), (128, 2, 640)):
        words = random_words(rows, columns * bits // 32, seed=bits)
        # Scales of both signs, as MLX writes them.
        scales, biases = draw.standard_normal((2, rows, columns // group)).astype(np.float32)
        theirs = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=group, bits=bits)
        assert torch.equal(numbers(Format("affine", bits, group), columns, words, scales, biases), torch_of(theirs))


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_experts_with_a_leading_axis_equal_mlx(mx, bits):
    draw = np.random.default_rng(bits)
    words = random_words(3, 5, 96 * bits // 32)
    scales, biases = draw.standard_normal((2, 3, 5, 3)).astype(np.float32)
    theirs = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=32, bits=bits)
    assert torch.equal(numbers(Format("affine", bits, 32), 96, words, scales, biases), torch_of(theirs))


@pytest.mark.parametrize("mode", FLOAT_MODES)
@pytest.mark.parametrize("leading", [(), (3,)])
def test_float_modes_equal_mlx(mx, mode, leading):
    format = float_format(mode)
    columns = 96
    words = random_words(*leading, 7, format.words(columns))
    if mode == "mxfp8":
        # The two codes that are no numbers compare unequal to themselves.
        codes = words.view(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
    scales = np.random.default_rng(1).integers(1, 255, (*leading, 7, format.groups(columns))).astype(np.uint8)
    if mode == "nvfp4":
        scales[(scales & 0x7F) == 0x7F] = 3
    theirs = mx.dequantize(mx.array(words), mx.array(scales), mode=mode, dtype=mx.float32)
    assert torch.equal(numbers(format, columns, words, scales), torch_of(theirs))


@pytest.mark.parametrize("shared", [0.37, 1.0, 5.123, 2688.0])
def test_a_global_scale_equals_mlx(mx, shared):
    words, scales = random_words(5, 8), np.random.default_rng(1).integers(0, 127, (5, 4)).astype(np.uint8)
    theirs = mx.dequantize(
        mx.array(words), mx.array(scales), mode="nvfp4", global_scale=mx.array(shared), dtype=mx.float32
    )
    ours = numbers(float_format("nvfp4"), 64, words, scales, shared=np.float32(shared))
    assert torch.equal(ours, torch_of(theirs))


def test_each_expert_has_its_own_global_scale(mx):
    words, scales = random_words(2, 3, 8), np.random.default_rng(1).integers(0, 127, (2, 3, 4)).astype(np.uint8)
    shared = np.array([0.7, 900.0], np.float32)
    ours = numbers(float_format("nvfp4"), 64, words, scales, shared=shared)
    for expert in range(2):
        one = {"mode": "nvfp4", "global_scale": mx.array(float(shared[expert])), "dtype": mx.float32}
        theirs = mx.dequantize(mx.array(words[expert]), mx.array(scales[expert]), **one)
        assert torch.equal(ours[expert], torch_of(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_cast_comes_last(mx, dtype):
    words = random_words(4, 12)
    scales, biases = np.random.default_rng(0).standard_normal((2, 4, 2)).astype(np.float32)
    packed = PackedWeight(
        Format("affine", 6, 32), 64, *map(torch.from_numpy, (words, scales, biases)), compute_dtype=dtype
    )
    wide = torch_of(mx.dequantize(*map(mx.array, (words, scales, biases)), group_size=32, bits=6))
    assert packed.dequantise().dtype == dtype
    assert torch.equal(packed.dequantise(), wide.to(dtype))


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("columns", [1, 7, 31, 33, 96])
def test_packing_is_the_inverse_of_unpacking(bits, columns):
    codes = torch.randint(0, 1 << bits, (3, columns), generator=torch.Generator().manual_seed(bits))
    words = pack(codes, bits)
    assert words.shape == (3, -(-columns * bits // 32)) and words.dtype == torch.int32
    assert torch.equal(unpack(words, bits, columns).long(), codes)


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_a_row_is_one_little_endian_stream(bits):
    codes = torch.randint(0, 1 << bits, (1, 64), generator=torch.Generator().manual_seed(0))
    stream = sum(int(code) << (bits * place) for place, code in enumerate(codes[0]))
    data = pack(codes, bits).numpy().tobytes()
    assert int.from_bytes(data, "little") == stream


def test_groups_of_any_size_work():
    format = Format("affine", 5, 3)
    codes = torch.arange(18).view(2, 9) % 32
    scales, biases = torch.tensor([[1.0, -2.0, 0.5]] * 2), torch.tensor([[0.0, 1.0, -1.0]] * 2)
    made = PackedWeight(format, 9, pack(codes, 5), scales, biases, compute_dtype=torch.float32).dequantise()
    wanted = codes * scales.repeat_interleave(3, 1) + biases.repeat_interleave(3, 1)
    assert torch.equal(made, wanted)


def test_large_weights_are_dequantised_in_blocks(monkeypatch):
    from longtune.model.packed import formats

    words = torch.from_numpy(random_words(37, 12).view(np.int32))
    scales = torch.randn(37, 3)
    packed = PackedWeight(Format("affine", 4, 32), 96, words, scales, scales * 2, compute_dtype=torch.float32)
    whole = packed.dequantise()
    monkeypatch.setattr(formats, "BLOCK", 500)
    assert torch.equal(packed.dequantise(), whole)


def test_no_rows_are_fine():
    empty = PackedWeight(
        Format("affine", 4, 32),
        32,
        torch.zeros(0, 4, dtype=torch.int32),
        torch.zeros(0, 1),
        torch.zeros(0, 1),
        compute_dtype=torch.float32,
    )
    assert empty.dequantise().shape == (0, 32)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("int4", 4, 32), "unknown mode 'int4'"),
        (("affine", 7, 32), "no width of 7 bits"),
        (("affine", 0, 32), "no width of 0 bits"),
        (("affine", 4, 0), "can't have 0 numbers"),
        (("mxfp4", 4, 64), "mxfp4 is 4 bits in groups of 32"),
        (("nvfp4", 8, 16), "nvfp4 is 4 bits in groups of 16"),
    ],
)
def test_formats_that_there_are_not(settings, reason):
    with pytest.raises(ValueError, match=reason):
        Format(*settings)


def test_groups_must_divide_a_row():
    with pytest.raises(ValueError, match="groups of 64 don't divide a row of 96"):
        Format("affine", 4, 64).groups(96)


def test_the_tables_hold_every_code():
    assert value_table("mxfp4").numel() == 16 and value_table("mxfp8").numel() == 256
    assert scale_table("mxfp4")[127] == 1 and scale_table("mxfp4")[0] == 2.0**-127
    assert scale_table("nvfp4")[0x38] == 1
