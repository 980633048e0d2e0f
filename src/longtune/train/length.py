"""The order and the length of a run: what can be said of its config only once its data is known.

How long a run is is `data.run_length`'s work; here the config is held against it, for `train`, `plan` and `check`
alike.
"""

from __future__ import annotations

from typing import Any

from longtune.config import RunConfig, warmup_refusal
from longtune.data import Batcher
from longtune.data.run_length import RunLength, run_length
from longtune.errors import Problem, UserError


def batcher(config: RunConfig, data: Any) -> Batcher:
    """The order and the micro-batches of a run.

    Args:
        data: a `Dataset`, or what stands for one (`data.batching.Rows`); it must not be empty.
    """
    settings = config.train
    return Batcher(
        data,
        batch_size=settings.batch_size,
        tokens_per_batch=settings.tokens_per_batch,
        seed=settings.seed,
        # The rows of the first step: a run that doesn't fit says so at once.
        longest_first=settings.batch_size * settings.accumulate,
    )


def length(config: RunConfig, batches: Batcher) -> RunLength:
    """Steps and micro-batches of the whole run, and what it sees."""
    train = config.train
    return run_length(batches, steps=train.steps, epochs=train.epochs, accumulate=train.accumulate)


def refusals(config: RunConfig, batches: Batcher, found: RunLength) -> list[Problem]:
    """The problems of a run of this length: sources whose weight is too small for it, and a warm-up as long as it."""
    problems = found.never_seen(batches.shares)
    if found.steps:
        problems += [Problem(key, why, fix) for key, why, fix in warmup_refusal(config, found.steps)]
    return problems


def checked_length(config: RunConfig, batches: Batcher) -> RunLength:
    """The length of a run; raises UserError with all of `refusals`."""
    found = length(config, batches)
    if problems := refusals(config, batches, found):
        raise UserError(problems)
    return found
