"""Order and batches: which examples go together, when, and where a resumed run goes on.

The order is a function of (seed, epoch) alone; the cursor is two numbers. Batches are lists of trees: a forest lays
them end to end without padding, so rows of any lengths go together.
"""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

from longtune.data.shares import Share, drawn_in, next_filled

if TYPE_CHECKING:
    from longtune.tree import Tree


_SAMPLED = 1000
"""Batches that are enough to stand for all of a run."""
WALKED = 100_000
"""Batches up to which epochs that differ are gone through one by one to find where a run of so many steps ends."""


class Rows(Protocol):
    """What is batched: a `Dataset`, or something that stands for one."""

    @property
    def trees(self) -> Sequence[Tree]: ...

    @property
    def shares(self) -> Sequence[Share]:
        """How often the rows of each source come."""
        ...


def epoch_order(count: int, seed: int, epoch: int, shares: Sequence[Share] | None = None) -> list[int]:
    """Indices of the examples in the order of an epoch, a function of its arguments alone.

    Args:
        count: number of examples.
        shares: how often those of each source come; None is once each.
    """
    indices = list(range(count)) if shares is None else drawn_in(shares, seed, epoch)
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices


class Batcher:
    """Batches of trees, epoch after epoch without end.

    Within an epoch every example comes exactly once, or as often as its source's weight says (`shares`); the last batch
    of an epoch may be smaller, and an epoch without a row is passed over.

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
        self._shares: Sequence[Share] = getattr(data, "shares", None) or (Share("", 0, len(trees)),)
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
            order = epoch_order(len(self._trees), self._seed, epoch, self._shares)
        else:
            order = drawn_in(self._shares, self._seed, epoch)
        if self._longest_first and epoch == 0:
            sizes = self.sizes
            first = sorted(range(len(order)), key=lambda place: -sizes[order[place]])[: self._longest_first]
            front = [order[place] for place in first]
            taken = set(first)
            order = front + [index for place, index in enumerate(order) if place not in taken]
        if self._tokens is None:
            return [order[i : i + self._batch_size] for i in range(0, len(order), self._batch_size)]
        return _pack(order, self.sizes, self._tokens)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each example."""
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
        if self.index >= len(self):
            self.epoch, self.index = next_filled(self._shares, self.epoch + 1), 0
        batch = self.plan(self.epoch)[self.index]
        self.index += 1
        return [self._trees[i] for i in batch]

    def __len__(self) -> int:
        """Batches of the current epoch."""
        return self.batches_in(self.epoch)

    def batches_in(self, epoch: int) -> int:
        """Batches of an epoch."""
        if self._tokens is not None:
            return len(self.plan(epoch))
        return -(-sum(share.drawn(epoch + 1) - share.drawn(epoch) for share in self._shares) // self._batch_size)

    def batches_before(self, epoch: int) -> int:
        """Batches of all epochs before one."""
        if self._alike:
            return epoch * self.batches_in(0)
        return sum(
            self.batches_in(earlier) for earlier in takewhile(lambda filled: filled < epoch, self.filled_epochs())
        )

    def cursor_after(self, count: int) -> tuple[int, int]:
        """(epoch, index) after the first so many batches of all: exact, or projected past `WALKED` of them."""
        if self._alike:
            return divmod(count, self.batches_in(0))
        done, after = 0, 0
        for epoch in self.filled_epochs():
            if done >= min(count, WALKED):
                break
            here = self.batches_in(epoch)
            if done + here > count:
                return epoch, count - done
            done, after = done + here, epoch + 1
        return after + (count - done) * after // done, 0

    def seen_before(self, epoch: int, index: int) -> tuple[tuple[int, ...], int]:
        """What comes before a cursor: the rows of each share, and the tokens of all of them."""
        sizes = self.sizes
        rows = [share.drawn(epoch) for share in self._shares]
        tokens = 0
        for share, drawn in zip(self._shares, rows, strict=True):
            turns, rest = divmod(drawn, share.rows) if share.rows else (0, 0)
            tokens += turns * sum(sizes[share.first : share.end])
            tokens += sum(sizes[row] for row in share.draw(self._seed, drawn - rest, drawn))
        begun = [row for batch in (self.plan(epoch)[:index] if index else ()) for row in batch]
        for number, share in enumerate(self._shares):
            rows[number] += sum(share.first <= row < share.end for row in begun)
        return tuple(rows), tokens + sum(sizes[row] for row in begun)

    def sample(self, count: int) -> list[list[int]]:
        """Indices of the examples of the first `count` batches, or of as many whole epochs as stand for them."""
        batches: list[list[int]] = []
        for epoch in self.filled_epochs():
            batches += self.plan(epoch)
            if len(batches) >= min(count, _SAMPLED):
                break
        return batches[:count]

    def largest(self) -> list[int]:
        """Indices of the examples of a batch than which none in the run is longer, but for chance: rows of a fractional
        weight that meet twice, and packed epochs that fill a batch a little better."""
        sizes = self.sizes
        # The first epoch need not have the longest row, so all rows together stand for the later ones.
        whole = [
            row for share in self._shares for row in range(share.first, share.end) for _ in range(ceil(share.weight))
        ]
        if self._tokens is None:
            others = [heapq.nlargest(self._batch_size, whole, key=sizes.__getitem__)]
        else:
            others = _pack(whole, sizes, self._tokens)
        found = [*self.plan(next_filled(self._shares, 0)), *others]
        return max(found, key=lambda batch: sum(sizes[row] for row in batch))

    def filled_epochs(self) -> Iterator[int]:
        """The epochs that have rows."""
        epoch = 0
        while True:
            epoch = next_filled(self._shares, epoch)
            yield epoch
            epoch += 1

    @property
    def _alike(self) -> bool:
        """Whether all epochs have the same number of batches."""
        return self._tokens is None and all(share.weight % 1 == 0 for share in self._shares)

    @property
    def shares(self) -> Sequence[Share]:
        """How often the examples of each source come."""
        return self._shares

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
