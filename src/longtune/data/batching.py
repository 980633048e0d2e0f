"""Order and batches: which examples go together, when, and where a resumed run goes on.

The order is a function of (seed, epoch) alone; the cursor is two numbers. Batches are lists of trees: a forest lays
them end to end without padding, so rows of any lengths go together.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from longtune.tree import Tree


class Rows(Protocol):
    """What is batched: a `Dataset`, or something that stands for one."""

    @property
    def trees(self) -> Sequence[Tree]: ...

    @property
    def times(self) -> Sequence[float] | None:
        """How often each tree is seen in an epoch; None when it is once for all."""
        ...


def epoch_order(count: int, seed: int, epoch: int, times: Sequence[float] | None = None) -> list[int]:
    """Indices of the examples in the order of an epoch, a function of its arguments alone.

    Args:
        count: number of examples.
        times: how often each is seen in an epoch; of examples with the same fraction that share of them is drawn
            anew each epoch. None sees each once.
    """
    generator = random.Random(f"{seed}/{epoch}")
    indices = list(range(count))
    if times is not None:
        indices = [index for index in range(count) for _ in range(int(times[index]))]
        for fraction in sorted({value % 1 for value in times} - {0.0}):
            some = [index for index in range(count) if times[index] % 1 == fraction]
            indices += generator.sample(some, round(fraction * len(some)))
    generator.shuffle(indices)
    return indices


class Batcher:
    """Batches of trees, epoch after epoch without end.

    Within an epoch every example comes exactly once (or as often as its source's weight says); the last batch of an
    epoch may be smaller.

    Args:
        data: a data set, or a sequence of trees.
        batch_size: trees in a batch.
        tokens_per_batch: instead of `batch_size`: pack trees of up to this many tokens together, first-fit over
            windows of the order. A longer tree is a batch of its own.
        seed: of the order.
        shuffle: False keeps the order of the sources.
        longest_first: begin the first epoch with so many of its longest trees, the longest first, so that a run that
            won't fit fails at once. Given the trees of a step, the steps don't depend on how they are cut into batches.
    """

    def __init__(
        self,
        data: Rows | Sequence[Tree],
        *,
        batch_size: int = 1,
        tokens_per_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        longest_first: int = 0,
    ):
        if batch_size < 1 or (tokens_per_batch is not None and tokens_per_batch < 1):
            raise ValueError("batch_size and tokens_per_batch must be at least 1")
        trees: Any = getattr(data, "trees", data)
        if not len(trees):
            raise ValueError("there are no examples to batch")
        self._trees: Sequence[Tree] = trees
        self._times: Sequence[float] | None = getattr(data, "times", None)
        self._sizes: list[int] | None = None
        self._batch_size = batch_size
        self._tokens = tokens_per_batch
        self._seed = seed
        self._shuffle = shuffle
        self._longest_first = longest_first
        self.epoch = 0
        """Epoch of the next batch."""
        self.index = 0
        """Index of the next batch in its epoch."""
        self._plan_of: tuple[int, list[list[int]]] | None = None

    def plan(self, epoch: int) -> list[list[int]]:
        """Indices of the examples of each batch of an epoch."""
        if self._plan_of is None or self._plan_of[0] != epoch:
            self._plan_of = (epoch, self._make_plan(epoch))
        return self._plan_of[1]

    def _make_plan(self, epoch: int) -> list[list[int]]:
        if self._shuffle:
            order = epoch_order(len(self._trees), self._seed, epoch, self._times)
        else:
            order = sorted(epoch_order(len(self._trees), self._seed, epoch, self._times))
        if self._longest_first and epoch == 0:
            sizes = self._all_sizes()
            first = sorted(range(len(order)), key=lambda place: -sizes[order[place]])[: self._longest_first]
            front = [order[place] for place in first]
            taken = set(first)
            order = front + [index for place, index in enumerate(order) if place not in taken]
        if self._tokens is None:
            return [order[i : i + self._batch_size] for i in range(0, len(order), self._batch_size)]
        return _pack(order, self._all_sizes(), self._tokens)

    def _all_sizes(self) -> list[int]:
        if self._sizes is None:
            known = getattr(self._trees, "sizes", None)
            self._sizes = list(known) if known is not None else [tree.size for tree in self._trees]
        return self._sizes

    def __iter__(self) -> Iterator[list[Tree]]:
        """Batches from the cursor on; the cursor has moved past a batch when it is handed out."""
        while True:
            yield self.next()

    def next(self) -> list[Tree]:
        """The next batch."""
        batches = self.plan(self.epoch)
        if self.index >= len(batches):
            self.epoch, self.index = self.epoch + 1, 0
            return self.next()
        batch = batches[self.index]
        self.index += 1
        return [self._trees[i] for i in batch]

    def __len__(self) -> int:
        """Batches of the current epoch."""
        return len(self.plan(self.epoch))

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "count": len(self._trees),
            "batch_size": self._batch_size,
            "tokens_per_batch": self._tokens,
            "shuffle": self._shuffle,
            "longest_first": self._longest_first,
        }

    def state(self) -> dict[str, Any]:
        """The cursor, as plain JSON values."""
        return {"epoch": self.epoch, "index": self.index, **self._settings()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state` was taken.

        Raises:
            ValueError: it was taken with other settings or another number of examples.
        """
        mine = self._settings()
        changed = [
            f"{name} {state.get(name)!r} -> {value!r}" for name, value in mine.items() if state.get(name) != value
        ]
        if changed:
            raise ValueError(f"the data cursor was saved under other settings: {', '.join(changed)}")
        self.epoch, self.index = int(state["epoch"]), int(state["index"])


def run_length(batches: Batcher, *, steps: int | None, epochs: float | None, accumulate: int) -> tuple[int, int]:
    """Optimiser steps and micro-batches of a run of so many steps, or else epochs (1 if neither is given)."""
    if steps is not None:
        return steps, steps * accumulate
    whole, part = divmod(epochs or 1.0, 1.0)
    # Packed by tokens, epochs differ in their number of batches.
    micro_batches = sum(len(batches.plan(epoch)) for epoch in range(int(whole)))
    if part:
        micro_batches += math.ceil(part * len(batches.plan(int(whole))))
    return math.ceil(micro_batches / accumulate), micro_batches


def _pack(order: list[int], sizes: Sequence[int], limit: int, window: int = 1024) -> list[list[int]]:
    """Best-fit decreasing over windows of the order: few, full batches, and still a random order of them."""
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        bins: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (what is left, bin), sorted: the tightest that fits is found by bisection.
        for place in sorted(range(len(part)), key=lambda place: (-sizes[part[place]], place)):
            size = sizes[part[place]]
            at = bisect.bisect_left(room, (size, -1))
            left, chosen = room.pop(at) if at < len(room) else (limit, len(bins))
            if chosen == len(bins):
                bins.append([])
            bins[chosen].append(place)
            bisect.insort(room, (left - size, chosen))
        bins.sort(key=min)
        batches += [[part[place] for place in members] for members in bins]
    return batches
