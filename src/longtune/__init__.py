"""longtune: LoRA fine-tuning of language models on long rows, on the memory one has.

The names below are the public surface; everything is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtune.config import load_config
    from longtune.engine import Plan
    from longtune.errors import DoesNotFit, Problem, UserError
    from longtune.integrations.transformers import stream
    from longtune.train import train
    from longtune.train.planning import plan

__version__ = "0.1.0"

__all__ = ["DoesNotFit", "Plan", "Problem", "UserError", "__version__", "load_config", "plan", "stream", "train"]

_HOMES = {
    "DoesNotFit": "longtune.errors",
    "Plan": "longtune.engine",
    "Problem": "longtune.errors",
    "UserError": "longtune.errors",
    "load_config": "longtune.config",
    "plan": "longtune.train.planning",
    "stream": "longtune.integrations.transformers",
    "train": "longtune.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'longtune' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
