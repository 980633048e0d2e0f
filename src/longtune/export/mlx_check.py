"""mlx-lm itself as the reader of what was written for it, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

NOT_INSTALLED = "mlx-lm is not installed here, so longtune's own reader of its layout was asked"


def installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def knows(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has a model's architecture, by its config.json; True where it isn't installed to be asked."""
    if not installed():
        return True
    from mlx_lm.utils import MODEL_REMAPPING

    kind = str(config.get("model_type"))
    return importlib.util.find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}") is not None


def logits(model: Path, tokens: torch.Tensor, adapter: Path | None = None) -> tuple[torch.Tensor | None, str]:
    """Logits [tokens, vocabulary] that mlx-lm computes in fp32, or None with the reason.

    Args:
        model: a model's folder; quantised weights stay as they are.
        tokens: [1, tokens].
        adapter: a folder of its layout.

    Raises:
        ValueError: the adapter has tensors that mlx-lm's model has no place for; it would ignore them silently.
    """
    if not installed():
        return None, NOT_INSTALLED
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    try:
        read: Any = load_model(model, lazy=True)[0]
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
        return None, f"mlx-lm can't read {model} ({_first_line(error)}), so longtune's own reader was asked"
    # Scales of float formats are bytes, and cast nothing.
    read.set_dtype(mx.float32)
    if adapter is not None:
        written = mx.load(str(adapter / "adapters.safetensors"))
        load_adapters(read, str(adapter))
        held = {str(name) for name, _ in cast(Any, tree_flatten(read.parameters()))}
        lost = sorted({str(name) for name in written} - held)
        if lost:
            raise ValueError(f"mlx-lm's model has no place for {', '.join(lost[:5])}")
    read.eval()
    try:
        found = np.array(read(mx.array(tokens.numpy())).astype(mx.float32))
    except Exception as error:  # Its architectures fail in many ways where a config is other than they expect.
        return None, f"mlx-lm can't run {model} ({_first_line(error)}), so longtune's own reader was asked"
    return torch.from_numpy(found)[0], ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def has_folder(path: Path | None) -> bool:
    """Whether mlx-lm could read the base model from there."""
    return path is not None and path.is_dir() and any(path.glob("model*.safetensors"))
