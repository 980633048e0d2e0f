"""Storing a plain model's weights in fewer bits while it is loaded: bitsandbytes' NF4 and int8, through transformers.

Checkpoints that are quantised already need nothing of this.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, cast

import torch
from torch import nn

from longtune.errors import Problem, UserError

WAYS = ("nf4", "int8")
"""What `quantise_on_load` may be. nf4: 4-bit normal floats in blocks of 64, their scales quantised once more. int8:
rows of integers, multiplied as LLM.int8 does."""


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


def settle(model: nn.Module) -> None:
    """Keep 4-bit weights as they were stored, and 8-bit ones quiet.

    On some CPUs bitsandbytes lays them out anew, with coarser scales, at the first forward without a gradient: the
    numbers of a forward and of its backward would then differ.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            cast(Any, module).support_avx512bf16_for_cpu = False
        elif type(module).__name__ == "Linear8bitLt":
            # At each call it says that inputs are cast to float16, which is what int8 means there.
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
