"""The walk over layers x chunks, its plan, and its stores."""

from longtune.engine.engine import Engine
from longtune.engine.plan import Plan

__all__ = ["Engine", "Plan"]
