"""What a module's storage is, whatever kind of base it belongs to."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from longtune.engine import Engine, Plan
from longtune.errors import UserError
from longtune.model.adapters import add_lora
from longtune.model.loading import load_model
from longtune.model.lora import LeanLinear
from longtune.model.packed import PackedLinear, bits_of, dequantise, is_quantised, packed_bytes, remember_bits
from longtune.model.packed.gguf import read_widths, remember_gguf_bits, width_of
from longtune.model.packed.onload import settle
from longtune.tree import Forest
from tests.model.packed import support
from tests.model.packed.support import packed_linear
from tests.support import oracle_gradients, pair_tree, tiny_model, walk_gradients, worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_plain_module_has_the_width_of_its_dtype(dtype):
    linear = nn.Linear(6, 4, dtype=dtype)
    assert bits_of(linear) == 8 * dtype.itemsize and not is_quantised(linear)
    assert packed_bytes(linear) == 28 * dtype.itemsize
    assert torch.equal(dequantise(linear, torch.float64), linear.weight.double())


def test_a_packed_module_says_its_own():
    linear = packed_linear(8, 64, bits=3)
    assert bits_of(linear) == 3 and is_quantised(linear)
    assert packed_bytes(linear) == 8 * (64 * 3 // 8 + 2 * 2 * 4)
    assert torch.equal(dequantise(linear), linear.dequantise())


def test_the_weight_of_a_conv1d_comes_as_out_by_in():
    module = Conv1D(4, 6)
    assert dequantise(module).shape == (4, 6)


def test_bytes_of_a_model_count_a_shared_tensor_once():
    model = tiny_model("llama", torch.float32, tie_word_embeddings=True)
    assert packed_bytes(model) == sum(
        x.numel() * x.itemsize for x in {id(x): x for x in [*model.parameters(), *model.buffers()]}.values()
    )


def test_a_remembered_width_is_the_answer():
    linear = nn.Linear(6, 4)
    remember_bits(linear, 4)
    assert bits_of(linear) == 4 and is_quantised(linear)
    remember_bits(linear, 16)
    assert bits_of(linear) == 16 and not is_quantised(linear)


@pytest.mark.parametrize("question", [bits_of, is_quantised, dequantise])
def test_a_module_without_a_weight_is_an_error(question):
    with pytest.raises(ValueError, match="a ReLU has no weight"):
        question(nn.ReLU())


def test_integers_that_nobody_can_read_are_an_error():
    module = nn.Module()
    module.register_buffer("weight", torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="can't be dequantised"):
        dequantise(module)


class Int4Tensor(torch.Tensor):
    """Stands for a tensor of torchao: a subclass that says by its name, or by its range, what it stores."""

    def dequantize(self) -> torch.Tensor:
        return torch.full(self.shape, 0.5)


class RangedTensor(Int4Tensor):
    quant_min, quant_max = 0, 7


@pytest.mark.parametrize(("kind", "bits"), [(Int4Tensor, 4), (RangedTensor, 3)])
def test_a_tensor_subclass_is_asked(kind, bits):
    linear = nn.Linear(6, 4, bias=False)
    weight = nn.Parameter(torch.zeros(4, 6).as_subclass(kind), requires_grad=False)
    linear.weight = weight
    assert bits_of(linear) == bits and is_quantised(linear)
    assert torch.equal(dequantise(linear, torch.float64), torch.full((4, 6), 0.5, dtype=torch.float64))


def test_a_scheme_of_compressed_tensors_is_asked():
    linear = nn.Linear(6, 4)
    linear.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(num_bits=8))
    assert bits_of(linear) == 8 and is_quantised(linear)


def test_packed_words_of_gptq_are_asked_for_their_width():
    module = nn.Module()
    module.bits = 3
    module.register_buffer("qweight", torch.zeros(6, 4, dtype=torch.int32))
    assert bits_of(module) == 3 and is_quantised(module)
    with pytest.raises(ValueError, match="can't be dequantised"):
        dequantise(module)


@pytest.mark.parametrize(
    ("name", "width"), [("Q4_K", 4), ("IQ2_XXS", 2), ("BF16", 16), ("F32", 32), ("MXFP4", 4), ("COUNT", None)]
)
def test_widths_by_the_names_of_gguf_types(name, width):
    assert width_of(name) == width


def write_gguf(file: Path, model: nn.Module) -> None:
    """A GGUF file of a tiny llama's linears in Q4_0, its embedding in Q8_0, and everything else in F32."""
    gguf = pytest.importorskip("gguf", reason="GGUF needs the package gguf")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 0.25, 1.0])
    writer.add_bool("some.flag", True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for path, module in model.named_modules():
        if "weight" not in module._parameters or (there := names.get_name(path)) is None:
            continue
        kind = gguf.GGMLQuantizationType.F32
        if isinstance(module, nn.Linear | nn.Embedding):
            kind = gguf.GGMLQuantizationType[f"Q{4 if isinstance(module, nn.Linear) else 8}_0"]
        data = gguf.quants.quantize(module.weight.detach().numpy(), kind)
        writer.add_tensor(f"{there}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_widths_are_remembered(tmp_path):
    model = tiny_model("llama", torch.float32, num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    write_gguf(tmp_path / "model.gguf", model)
    architecture, widths = read_widths(tmp_path / "model.gguf")
    assert architecture == "llama" and widths["blk.1.attn_q.weight"] == 4
    assert remember_gguf_bits(model, tmp_path / "model.gguf", 2) == 2 * 9 + 3
    assert {bits_of(module) for module in model.modules() if isinstance(module, nn.Linear)} == {4}
    assert bits_of(model.model.embed_tokens) == 8
    assert bits_of(model.model.norm) == 32 and not is_quantised(model.model.norm)


def test_a_gguf_header_that_ends_early_is_an_error(tmp_path):
    pytest.importorskip("gguf", reason="GGUF needs the package gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + b"\x05")
    with pytest.raises(struct.error):
        read_widths(file)
    file.write_bytes(b"GGML" + bytes(20))
    with pytest.raises(ValueError, match="no GGUF file"):
        read_widths(file)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    pytest.importorskip("bitsandbytes", reason="nf4 and int8 are the work of bitsandbytes")
    folder = tmp_path_factory.mktemp("plain") / "model"
    support.write_plain(folder, "llama", hidden_size=128, head_dim=32, intermediate_size=192)
    return folder


@pytest.mark.libraries
def test_nf4_is_exact_through_the_walk(plain):
    model = load_model(str(plain), dtype="float32", device="cpu", quantise="nf4").model
    projection = model.model.layers[0].self_attn.q_proj
    assert bits_of(projection) == 4 and is_quantised(projection)
    # Half a byte each, a byte for the scale of 64, and constants.
    assert 128 * 128 * (0.5 + 1 / 64) < packed_bytes(projection) < 128 * 128 * (0.5 + 1 / 64) + 2500
    x = torch.randn(5, 128)
    assert torch.allclose(projection(x), x @ dequantise(projection).T, atol=1e-5)
    assert_walk_is_exact(model, LeanLinear, 1e-5)


@pytest.mark.libraries
def test_int8_is_exact_through_the_walk(plain):
    model = load_model(str(plain), dtype="float32", device="cpu", quantise="int8").model
    projection = model.model.layers[0].self_attn.q_proj
    assert bits_of(projection) == 8 and is_quantised(projection)
    # A byte each, and a scale and a shift for each row.
    assert packed_bytes(projection) == 128 * (128 + 8)
    x = 20 * torch.randn(5, 128)  # Larger than what bitsandbytes' own product excepts from rounding.
    assert torch.allclose(projection(x), x @ dequantise(projection).T, atol=1e-4)
    assert torch.allclose(projection(x)[1:], projection(x[1:]), atol=1e-4)
    assert_walk_is_exact(model, LeanLinear, 1e-5)


@pytest.mark.libraries
@pytest.mark.parametrize(("columns", "bias"), [(32, False), (31, True), (1, False)])
def test_int8_numbers_are_those_of_bitsandbytes(columns, bias):
    bnb = pytest.importorskip("bitsandbytes", reason="int8 is the work of bitsandbytes")
    weight = torch.randn(6, columns, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    linear = bnb.nn.Linear8bitLt(columns, 6, bias=bias, has_fp16_weights=False)
    linear.load_state_dict({"weight": weight, **({"bias": torch.arange(6.0)} if bias else {})})
    model = nn.ModuleDict({"inner": nn.ModuleDict({"linear": linear.to("cpu")})})
    wanted = dequantise(linear)
    settle(model, torch.bfloat16)
    found = model["inner"]["linear"]
    assert isinstance(found, PackedLinear) and found.compute_dtype == torch.bfloat16
    torch.testing.assert_close(dequantise(found, torch.float32), wanted, rtol=1e-6, atol=1e-6)
    assert (found.bias is None) is not bias and not any(p.requires_grad for p in model.parameters())
    x = torch.randn(3, columns)
    torch.testing.assert_close(found(x), nn.functional.linear(x, wanted, found.bias), rtol=1e-5, atol=1e-5)


def assert_walk_is_exact(model: nn.Module, layer: type | None, tolerance: float) -> None:
    adapted = add_lora(model, rank=4, alpha=8)
    if layer is not None:
        assert isinstance(adapted.base_model.model.model.layers[0].self_attn.q_proj, layer)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    forest = Forest([pair_tree(prompt=9, answers=(5, 4), vocab=262)])
    cotangent = torch.rand(len(forest.targets), generator=torch.Generator().manual_seed(0))
    plain = oracle_gradients(adapted, forest, cotangent)
    engine = Engine(adapted, plan=Plan(chunk_tokens=None))
    try:
        found = walk_gradients(engine, forest, cotangent)
    finally:
        engine.close()
    assert worst(found, plain) < tolerance


@pytest.mark.libraries
def test_numbers_that_bitsandbytes_laid_out_for_a_cpu_kernel_are_read(plain):
    model = load_model(str(plain), dtype="float32", device="cpu", quantise="nf4").model
    projection = model.model.layers[0].self_attn.q_proj
    before = dequantise(projection)
    projection.support_avx512bf16_for_cpu = True
    projection.eval()(torch.randn(1, 128).bfloat16())
    if not getattr(projection.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("this CPU has no such kernel")
    # The kernel's scales are bfloat16.
    assert (dequantise(projection).float() - before).abs().max() < 2**-8 * before.abs().max()


@pytest.mark.libraries
@pytest.mark.parametrize(("way", "reason"), [("nf3", "is unknown"), ("nf4", "MLX checkpoint")])
def test_ways_that_can_not_be_taken(way, reason, plain, tmp_path):
    folder = plain
    if reason == "MLX checkpoint":
        folder = support.convert(plain, tmp_path / "packed", q_group_size=32)
    with pytest.raises(UserError, match=reason):
        load_model(str(folder), dtype="float32", device="cpu", quantise=way)
