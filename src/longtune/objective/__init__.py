"""Objectives by name. A new one is one file and one line here."""

from __future__ import annotations

from typing import Any

from longtune.objective.base import Objective, Outcome, Totals
from longtune.objective.dpo import Dpo
from longtune.objective.orpo import Orpo
from longtune.objective.sft import Sft
from longtune.objective.simpo import Simpo

OBJECTIVES: dict[str, type] = {
    "sft": Sft,
    "dpo": Dpo,
    "orpo": Orpo,
    "simpo": Simpo,
}


def get(name: str, **settings: Any) -> Objective:
    """The objective `name` with its settings."""
    return OBJECTIVES[name](**settings)


__all__ = ["OBJECTIVES", "Objective", "Outcome", "Totals", "get"]
