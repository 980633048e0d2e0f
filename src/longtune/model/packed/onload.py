"""What transformers is told about quantised weights while it loads a model.

A plain model's weights are stored in fewer bits on request: bitsandbytes' NF4 and int8. Of checkpoints that are
quantised already two kinds need help: those of compressed-tensors are dequantised, and their widths remembered;
bitsandbytes' layers are made to compute with what they store.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any, TypeGuard, cast

import torch
from torch import nn

from longtune.errors import Problem, UserError
from longtune.model.packed.formats import Format, pack
from longtune.model.packed.modules import PackedLinear
from longtune.model.packed.storage import int8_largest, remember_bits

WAYS = ("nf4", "int8")
"""What `quantise_on_load` may be. nf4: 4-bit normal floats in blocks of 64, their scales quantised once more. int8:
integers from -127 to 127, a scale for each row."""


def check_way(way: str, place: str, *, packed: bool, gguf: bool) -> None:
    """Refuse what can't be done.

    Args:
        packed: the checkpoint is MLX's. gguf: it is a GGUF file.
    """
    if way not in WAYS:
        raise UserError(Problem("quantise_on_load", f"{way!r} is unknown", f"use {' or '.join(WAYS)}"))
    if packed:
        raise UserError(
            Problem(place, "is an MLX checkpoint, which keeps its own format", "leave out quantise_on_load")
        )
    if gguf:
        reason = "a GGUF file is loaded dense, and can't be quantised on the way"
        raise UserError(Problem(place, reason, "leave out quantise_on_load, or start from the model's safetensors"))
    if importlib.util.find_spec("bitsandbytes") is None:
        reason = f"{way} is the work of bitsandbytes, which is not installed"
        raise UserError(Problem("quantise_on_load", reason, "pip install 'longtune[quant]'"))


def quantising(way: str, dtype: torch.dtype, existing: Any, place: str) -> dict[str, Any]:
    """Arguments of `from_pretrained`.

    Args:
        existing: the checkpoint's own quantisation, or None.
    """
    from transformers import BitsAndBytesConfig

    if existing is not None:
        raise UserError(Problem(place, "is quantised already, and keeps its own format", "leave out quantise_on_load"))
    if way == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    }


def is_compressed(existing: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a checkpoint's own quantisation is that of compressed-tensors."""
    return isinstance(existing, dict) and existing.get("quant_method") == "compressed-tensors"


def dequantised(existing: dict[str, Any]) -> dict[str, Any]:
    """The quantisation of a compressed-tensors checkpoint with the wish to have its weights dense.

    Left alone, the library makes them dense at the model's first forward, for good: memory would grow behind the
    planner's back, and until then a layer has no weight to compute with.
    """
    from transformers import CompressedTensorsConfig

    newer = "dequantize" in inspect.signature(CompressedTensorsConfig).parameters
    return {**existing, **({"dequantize": True} if newer else {"run_compressed": False})}


def remember_compressed_bits(model: nn.Module, existing: dict[str, Any]) -> None:
    """Note the widths that a compressed-tensors checkpoint stored its weights in."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import match_named_modules

    scheme = QuantizationConfig.model_validate(existing)
    for group in scheme.config_groups.values():
        if isinstance(group, str) or group.weights is None:
            continue
        for _, module in match_named_modules(model, group.targets, scheme.ignore):
            if isinstance(module, nn.Linear | nn.Embedding):
                remember_bits(module, group.weights.num_bits)


def settle(model: nn.Module, dtype: torch.dtype) -> None:
    """Have bitsandbytes' layers compute with the numbers that they store, whatever calls them.

    On some CPUs bitsandbytes lays 4-bit weights out anew, with coarser scales, at the first forward without a gradient:
    the numbers of a forward and of its backward would then differ. That is switched off. Its 8-bit layers round their
    inputs, too, and except the columns that are large in any row of a call: what a token gets depends on the others of
    its chunk. Packed linears with the same numbers take their place.

    Args:
        dtype: in which the model computes.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Linear4bit":
            cast(Any, module).support_avx512bf16_for_cpu = False
        elif isinstance(module, nn.Linear) and type(module.weight).__name__ == "Int8Params":
            model.set_submodule(name, _packed_rows(module, dtype))


def _packed_rows(linear: nn.Linear, dtype: torch.dtype) -> PackedLinear:
    """A linear of bitsandbytes' int8 (codes [O, I] from -127 to 127, the largest number of each row beside them) in the
    affine format: codes shifted by 128, each row a group, scales in fp32."""
    largest_O = int8_largest(linear)
    codes_OI = linear.weight.data.view(torch.uint8) ^ 128
    scales_O1 = (largest_O.float() / 127)[:, None]
    columns = codes_OI.shape[1]
    words_OW = codes_OI.view(torch.int32) if columns % 4 == 0 else pack(codes_OI, 8)
    bias = None if linear.bias is None else linear.bias.detach()
    format = Format("affine", 8, columns)
    return PackedLinear(format, columns, words_OW, scales_O1, -128 * scales_O1, bias=bias, compute_dtype=dtype)
