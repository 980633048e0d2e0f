"""A run's config: its schema, what of it is refused, and reading it.

What a value leads to (a plan, an optimiser, a batch) is decided by the rooms that use it; this one imports none of
them and stays cheap to import.
"""

from __future__ import annotations

from longtune.config.reading import Config, check_config, load_config, quoted
from longtune.config.refusals import supported_methods, warmup_refusal
from longtune.config.schema import LEARNING_RATES, DataSource, MemoryPlan, RunConfig, TrainConfig, describe_keys
from longtune.config.wording import shown

__all__ = [
    "LEARNING_RATES",
    "Config",
    "DataSource",
    "MemoryPlan",
    "RunConfig",
    "TrainConfig",
    "check_config",
    "describe_keys",
    "load_config",
    "quoted",
    "shown",
    "supported_methods",
    "warmup_refusal",
]
