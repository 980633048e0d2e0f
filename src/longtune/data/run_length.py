"""How long a run is and what it sees of each source, before its first step: exact, and without walking it.

The numbers come from a `Batcher`; what a config can't be given then is said by `train.length`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longtune.data.batching import Batcher
from longtune.data.shares import Share
from longtune.errors import Problem, counted


@dataclass(frozen=True, slots=True)
class RunLength:
    """What a run comes to.

    Attributes:
        steps: optimiser steps.
        micro_batches: of all steps.
        epochs: passes over the data, as a fraction of the last one's micro-batches.
        begun: epochs of which it has a part.
        rows: of each share, the rows that it sees; one that comes twice counts twice.
        tokens: of all these rows.
    """

    steps: int
    micro_batches: int
    epochs: float
    begun: int
    rows: tuple[int, ...]
    tokens: int

    def lines(self, shares: Sequence[Share]) -> list[str]:
        """Lines to print of each source, where they differ: a weight, or several sources."""
        if len(shares) < 2 and all(share.weight == 1 for share in shares):
            return []
        return [
            f"{share.name}: {counted(share.rows, 'row')}, weight {share.weight:g}, {seen:,} seen in this run"
            for share, seen in zip(shares, self.rows, strict=True)
        ]

    def never_seen(self, shares: Sequence[Share]) -> list[Problem]:
        """The problems of sources whose weight is too small for a single row to come in so short a run."""
        problems = []
        for share in shares:
            if not share.rows or share.drawn(self.begun):
                continue  # One without rows is a problem of the data, which is told when it is read.
            an_epoch = f"{share.weight * share.rows:.2g}"
            problems.append(
                Problem(
                    share.name,
                    f"none of its {counted(share.rows, 'row')} comes in this run: weight {share.weight:g} gives "
                    f"{an_epoch} rows an epoch, and the run has {counted(self.begun, 'epoch')}",
                    f"raise its weight to {share.least_weight(self.begun):g} at least, set train.epochs to "
                    f"{share.epochs_for(1):,}, or take it out",
                )
            )
        return problems

    def not_reached(self, shares: Sequence[Share]) -> list[str]:
        """What to say of sources none of whose rows comes, because the run ends before the epoch does."""
        ends = f"the run ends after {counted(self.steps, 'step')} ({counted(self.epochs, 'epoch')})"
        return [
            f"{share.name}: none of its {counted(share.rows, 'row')} comes: {ends}"
            for share, seen in zip(shares, self.rows, strict=True)
            if not seen and share.drawn(self.begun)
        ]


def run_length(batches: Batcher, *, steps: int | None, epochs: float | None, accumulate: int) -> RunLength:
    """The length of a run of so many steps, or else epochs (1 if neither is given).

    Of runs of more than `batching.WALKED` micro-batches that are given in steps, over epochs that differ, `epochs`,
    `rows` and `tokens` are a projection; the steps are always exact.
    """
    if steps is not None:
        micro_batches = steps * accumulate
        epoch, index = batches.cursor_after(micro_batches)
        begun = epoch + (index > 0)
    else:
        asked = epochs or 1.0
        whole, part = divmod(asked, 1.0)
        epoch, index = int(whole), math.ceil(part * batches.batches_in(int(whole))) if part else 0
        micro_batches = batches.batches_before(epoch) + index
        steps, begun = math.ceil(micro_batches / accumulate), math.ceil(asked)
    rows, tokens = batches.seen_before(epoch, index)
    passed = epoch + (index / batches.batches_in(epoch) if index else 0.0)
    return RunLength(steps, micro_batches, passed, begun, rows, tokens)
