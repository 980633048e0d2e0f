"""A model by its configuration alone, no weights read: on the meta device, with the right shapes and dtypes; and how
many positions it was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from longtune.errors import UserError
from longtune.model.embedded import EMBEDDED, embedded_folder
from longtune.model.loading import explain


def meta_model(name: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """The causal LM of a folder or hub name, frozen, on the meta device.

    Returns:
        None where the weights are stored in another way than the configuration says to transformers (packed or GGUF):
        such a model must be loaded to be known.

    Raises:
        UserError: there is no such model, or the hub doesn't give it.
    """
    folder = embedded_folder() if name == EMBEDDED else Path(name).expanduser()
    if name.endswith(".gguf"):
        return None
    if (folder / "config.json").is_file():
        stored = json.loads((folder / "config.json").read_text())
        if "quantization" in stored or "quantization_config" in stored:
            return None
    where = str(folder) if folder.is_dir() else name
    common = {"trust_remote_code": trust_remote_code, "local_files_only": folder.is_dir()}
    try:
        config = AutoConfig.from_pretrained(where, **common)
    except (OSError, ValueError, ImportError) as error:
        path = folder if folder.is_dir() else None
        raise UserError(explain(error, f"model: {name}", path, trust_remote_code)) from error
    if getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.requires_grad_(False)
    model.eval()
    return model


def positions_of(config: PretrainedConfig) -> int | None:
    """The positions that a model of this config was made for; None where it sets itself no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def model_positions(name: str, *, trust_remote_code: bool = False) -> int | None:
    """The positions that a model was made for; None where its config says none, or can't be read: loading the model
    tells why."""
    path = embedded_folder() if name == EMBEDDED else Path(name).expanduser()
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": path.exists()}
    where = str(path) if path.exists() else name
    if path.is_file():
        where, common["gguf_file"] = str(path.parent), path.name
    try:
        return positions_of(AutoConfig.from_pretrained(where, **common))
    except (OSError, ValueError, LookupError, ImportError, StrictDataclassError):
        return None
