"""llama.cpp's layout of an adapter: one GGUF file with `<tensor>.lora_a` and `.lora_b`, for `llama-cli --lora`.

llama.cpp scales by alpha / rank with one alpha and each tensor's own rank: other scales go into B. Names are those of
the `gguf` package's map. llama.cpp keeps query and key projections of llama-like models in another order of rows, so
their B is reordered as its converter reorders their weights. Only families whose layout was compared are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from longtune.errors import Problem, UserError
from longtune.export.combine import Named, commonest
from longtune.model.adapter_files import Update

FILE = "adapter.gguf"

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
}
"""llama.cpp's architecture by transformers' model type."""

_REORDERED = {"llama": ("attn_q", "attn_k")}
"""Tensors whose rows llama.cpp holds in another order, by its architecture."""


def check(model: PreTrainedModel) -> None:
    """Raises UserError for a model whose layout in llama.cpp isn't known here, or where `gguf` is missing."""
    kind = model.config.model_type
    if kind not in ARCHITECTURES:
        reason = f"how llama.cpp lays out the weights of {kind} isn't known here"
        fix = f"known: {', '.join(ARCHITECTURES)}; or --to merged, which llama.cpp's own converter reads"
        raise UserError(Problem("export --to gguf-lora", reason, fix))
    try:
        import gguf  # noqa: F401
    except ImportError:
        fix = "pip install 'longtune[gguf]'"
        raise UserError(Problem("export --to gguf-lora", "the package gguf is not installed", fix)) from None


def write(folder: Path, model: PreTrainedModel, updates: Named, *, base: str, dtype: torch.dtype | None = None) -> None:
    """Write adapter.gguf.

    Args:
        model: the base model, for its names and heads.
        dtype: of the tensors, float32 or float16; the default is float32.

    Raises:
        UserError: modules that have no name in llama.cpp; all of them.
    """
    import gguf

    arch = ARCHITECTURES[model.config.model_type]
    names = _tensor_names(model, updates)
    alpha = commonest([update.scale * update.rank for update in updates.values()])
    writer = gguf.GGUFWriter(folder / FILE, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_string(gguf.Keys.General.NAME, f"adapter of {Path(base).name}")
    number = np.float16 if dtype == torch.float16 else np.float32
    # What the file says is an fp32 number: B is scaled for that one.
    alpha = float(np.float32(alpha))
    for name, update in updates.items():
        ratio = update.scale * update.rank / alpha
        up_OR = update.up_OR.float() * ratio if ratio != 1 else update.up_OR.float()
        up_OR = _reordered(up_OR, names[name], arch, model.config)
        writer.add_tensor(f"{names[name]}.lora_a", update.down_RI.float().numpy().astype(number))
        writer.add_tensor(f"{names[name]}.lora_b", up_OR.contiguous().numpy().astype(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(file: Path, model: PreTrainedModel) -> dict[str, Update]:
    """The updates of an adapter's GGUF file by the names of `model`, scaled as llama.cpp scales them.

    Rows are put back by transformers' own reader of GGUF weights, not by the inverse of what `write` does.
    """
    import gguf
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    reader = gguf.GGUFReader(file)
    arch = _text(reader.fields[gguf.Keys.General.ARCHITECTURE])
    alpha = float(reader.fields[gguf.Keys.Adapter.LORA_ALPHA].parts[-1][0])
    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=model.config.to_dict())
    ours = {theirs: name for name, theirs in _tensor_names(model, _linears(model)).items()}
    halves: dict[str, dict[str, np.ndarray]] = {}
    for tensor in reader.tensors:
        name, _, side = tensor.name.rpartition(".")
        data = np.array(tensor.data, dtype=np.float32)
        halves.setdefault(name, {})[side] = processor.process(data, name).weights if side == "lora_b" else data
    return {
        ours[name]: Update(
            torch.from_numpy(np.ascontiguousarray(found["lora_a"])),
            torch.from_numpy(np.ascontiguousarray(found["lora_b"])),
            alpha / found["lora_b"].shape[1],
        )
        for name, found in halves.items()
    }


def _tensor_names(model: PreTrainedModel, names: Any) -> dict[str, str]:
    """llama.cpp's name of each module's weight."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ARCHITECTURES[model.config.model_type])
    table = gguf.get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    found = {name: table.get_name(f"{name}.weight", try_suffixes=(".weight",)) for name in names}
    problems = [Problem(name, "has no name in llama.cpp") for name, theirs in found.items() if theirs is None]
    if problems:
        raise UserError(problems[:10])
    return {name: theirs for name, theirs in found.items() if theirs is not None}


def _linears(model: PreTrainedModel) -> list[str]:
    from longtune.model.targets import choose_targets

    return choose_targets(model)


def _reordered(up_OR: torch.Tensor, name: str, arch: str, config: Any) -> torch.Tensor:
    """Rows of a head [first half, second half] -> pairs of one row of each: llama.cpp rotates neighbours."""
    part = name.split(".")[-2]
    if part not in _REORDERED.get(arch, ()):
        return up_OR
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    return up_OR.view(heads, 2, -1, up_OR.shape[1]).transpose(1, 2).reshape(up_OR.shape)


def _text(field: Any) -> str:
    return bytes(field.parts[-1]).decode()
