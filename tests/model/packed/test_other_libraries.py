"""Bases that other libraries quantised: widths, numbers, bytes, and gradients through the walk."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from longtune.engine import Engine, Plan
from longtune.engine.trace import Ghost, stored_bytes
from longtune.model.adapters import add_lora
from longtune.model.loading import load_model
from longtune.model.packed import bits_of, dequantise, is_quantised, packed_bytes
from longtune.model.rank_sources import find_figures
from longtune.tree import Forest
from tests.support import oracle_gradients, pair_tree, walk_gradients, worst

from . import support

pytestmark = pytest.mark.libraries

needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs the package {name}")
    for name in ("torchao", "compressed_tensors", "bitsandbytes")
}

KINDS = [
    pytest.param("int8", 8, 1 + 1 / 32, marks=needs["torchao"]),
    pytest.param("int4", 4, 1 + 5 / 32, marks=needs["torchao"]),
    pytest.param("float8", 8, 1 + 4 / 128, marks=needs["torchao"]),
    pytest.param("compressed", 4, 4, marks=needs["compressed_tensors"]),
    pytest.param("nf4", 4, 0.5 + 1 / 64, marks=needs["bitsandbytes"]),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    support.write_plain(folder, "llama", hidden_size=128, head_dim=32, intermediate_size=192)
    return folder


def quantised(plain: Path, kind: str, folder: Path) -> Path:
    """The model as its library saves it."""
    if kind == "compressed":
        model = compress(plain)
    elif kind == "nf4":
        return plain
    else:
        from torchao import quantization as ao
        from transformers import TorchAoConfig

        config = {
            "int8": lambda: ao.Int8WeightOnlyConfig(),
            "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
            "float8": lambda: ao.Float8WeightOnlyConfig(),
        }[kind]()
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=TorchAoConfig(config), dtype=torch.float32, device_map="cpu"
        )
    model.save_pretrained(folder)
    for file in plain.glob("token*"):
        shutil.copy(file, folder)
    if kind == "compressed":
        from compressed_tensors.compressors import ModelCompressor

        ModelCompressor.from_pretrained_model(model).update_config(str(folder))
    return folder


def compress(plain: Path) -> nn.Module:
    """Symmetric 4-bit integers in groups of 32, by compressed-tensors' own packing."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=weights)}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="pack-quantized")
    )
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                module.weight_scale.copy_(module.weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 7.5)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    return model


@pytest.mark.parametrize(("kind", "bits", "bytes_each"), KINDS)
def test_a_base_of_another_library_is_trained_on_as_it_is(kind, bits, bytes_each, plain, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = quantised(plain, kind, tmp_path / "stored")
        model = load_model(str(folder), dtype="float32", device="cpu", quantise="nf4" if kind == "nf4" else None).model
    projection = model.model.layers[0].self_attn.q_proj
    assert bits_of(projection) == bits and is_quantised(projection) and not is_quantised(model.lm_head)
    assert find_figures(model, folder, policy="by_bits").bits["model.layers.0.self_attn.q_proj"] == bits

    # Numbers: close to the plain ones, and those that the forward multiplies with.
    numbers = dequantise(projection, torch.float32)
    was = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).model.layers[0].self_attn.q_proj.weight
    assert 0 < torch.linalg.norm(numbers - was) < 0.2 * torch.linalg.norm(was)
    x = torch.randn(5, 128)
    torch.testing.assert_close(projection(x), x @ numbers.T, rtol=1e-4, atol=1e-5)

    # Bytes: of the numbers as they lie, scales included; the planner counts the same.
    held = packed_bytes(projection)
    assert held == pytest.approx(numbers.numel() * bytes_each, rel=0.15)
    if kind != "nf4":  # bitsandbytes keeps its constants beside the parameter.
        assert stored_bytes([*model.parameters(), *model.buffers()], 1) == packed_bytes(model)

    adapted = add_lora(model, rank=4, alpha=8, rank_policy="by_bits", bits={"model.layers.0.self_attn.q_proj": 8})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    forest = Forest([pair_tree(prompt=9, answers=(5, 4), vocab=262)])
    cotangent = torch.rand(len(forest.targets), generator=generator)
    truth = oracle_gradients(dense(adapted), forest, cotangent)
    plan = Plan(chunk_tokens=4, layers_per_segment=1)
    engine = Engine(adapted, plan=plan)
    try:
        found = walk_gradients(engine, forest, cotangent)
    finally:
        engine.close()
    assert worst(found, truth) < 1e-4

    ghost = Ghost(adapted, "cpu-flash", "cpu")
    assert ghost.trace(plan, forest).peak > 0
    ghost.close()


def dense(adapted: nn.Module) -> nn.Module:
    """A copy with plain linears of the dequantised numbers under the same adapters."""
    memo = {}
    for name, module in adapted.named_modules():
        if name.endswith("base_layer"):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight = nn.Parameter(dequantise(module, torch.float32), requires_grad=False)
            memo[id(module)] = linear
    return copy.deepcopy(adapted, memo)


@needs["compressed_tensors"]
def test_compressed_weights_are_dense_in_memory_and_named_so(plain, tmp_path):
    """Not packed until a first forward and dense afterwards, which would grow behind the planner's back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = quantised(plain, "compressed", tmp_path / "stored")
        model = load_model(str(folder), dtype="float32", device="cpu").model
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    before = packed_bytes(model)
    model(input_ids=torch.arange(5, 9)[None])
    assert (
        packed_bytes(model)
        == before
        == sum(p.numel() * 4 for p in model.parameters()) + packed_bytes(model.model.rotary_emb)
    )
