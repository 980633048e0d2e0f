"""Shared by the tests of packed bases: tiny checkpoints, MLX as the oracle, and dense copies of packed models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from longtune.model.packed import Format, PackedEmbedding, PackedLinear, PackedWeight, TiedHead
from longtune.model.packed.quantiser import quantise
from tests.support import ARCHITECTURES, tiny_model

SIZES: dict[str, Any] = dict(
    vocab_size=262, hidden_size=64, head_dim=16, intermediate_size=96, max_position_embeddings=64, num_hidden_layers=2
)
"""Rows that groups of 32 divide."""

TOKENS = np.arange(3, 40)[None]


def torch_of(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def write_plain(folder: Path, architecture: str, extra: dict[str, Any] | None = None, **changes: Any) -> nn.Module:
    """A tiny fp32 model with a tokenizer, as a transformers folder; `extra` goes into its config.json."""
    # Here, so that tests of kernels need nothing that reads data or configs.
    from tests.tiny_run import write_model

    write_model(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    layers = {"num_hidden_layers": 4} if "layer_types" in ARCHITECTURES[architecture] else {}
    model = tiny_model(architecture, torch.float32, **{**SIZES, **layers, **changes})
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (extra or {})))
    return model


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Other tensors in a checkpoint of one file."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def convert(source: Path, out: Path, **settings: Any) -> Path:
    """mlx-lm's own conversion."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is the oracle")
    from mlx_lm import convert as run

    run(str(source), str(out), quantize=True, **settings)
    return out


def mlx_logits(folder: Path) -> torch.Tensor:
    """mlx-lm's logits of TOKENS, in fp32."""
    mx = pytest.importorskip("mlx.core", reason="mlx is the oracle")
    load_model = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is the oracle").load_model
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return torch_of(model(mx.array(TOKENS)).astype(mx.float32))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float()


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def packed_linear(
    rows: int, columns: int, bits: int = 4, group: int = 32, seed: int = 0, bias: bool = False, **options: Any
) -> PackedLinear:
    """A random linear, its scales in fp32."""
    generator = torch.Generator().manual_seed(seed)
    format = Format("affine", bits, group)
    made = quantise(torch.randn(rows, columns, generator=generator), format)
    extra = torch.randn(rows, generator=generator) if bias else None
    dtype = options.pop("compute_dtype", torch.float32)
    return PackedLinear(
        format, columns, made.weight, made.scales, made.biases, compute_dtype=dtype, bias=extra, **options
    )


def dense_copy(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same model with every packed module replaced by a plain one that holds its numbers."""
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, PackedLinear | TiedHead):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=dtype)
            linear.weight.data = module.dequantise(dtype)
            if module.bias is not None:
                linear.bias.data = module.bias.data.to(dtype)
            made.set_submodule(name, linear.requires_grad_(False))
    for name, module in list(made.named_modules()):
        if isinstance(module, PackedEmbedding):
            made.set_submodule(name, _Rows(module, dtype))
    assert not [
        name
        for name, module in made.named_modules()
        if type(module) is not PackedWeight and isinstance(module, PackedWeight)
    ]
    return made


class _Rows(nn.Embedding):
    def __init__(self, packed: PackedEmbedding, dtype: torch.dtype):
        super().__init__(*packed.shape, dtype=dtype)
        self.weight.data = packed.dequantise(dtype)
        self.requires_grad_(False)
        self.scale = packed.scale

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        rows = super().forward(token)
        return rows if self.scale is None else rows * self.scale.to(rows)
