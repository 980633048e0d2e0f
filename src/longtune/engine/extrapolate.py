"""From what lives and is computed at the places of short walks to the same in a long row through a deep stack.

A walk repeats itself: one more chunk, or one more period of layers, adds the same to what lives at every place of the
walk (counted from either end), once a few of them are there. So a place's bytes are linear in both, and places are
extrapolated one by one. Where the last layers keep something else than those below them, a stack has two parts, each
for itself. Which rows and stacks are traced for it is decided in `forecast.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longtune.engine.meter import Bytes
from longtune.engine.trace import Traced
from longtune.engine.workspace import Work

Stacked = tuple[int, int]
"""Layers of a stack: those below, and the last ones, which keep something else (0 where all keep the same)."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """A stack, and the shorter ones that tell of it.

    Attributes:
        whole: the stack.
        units: of either part, layers after which the walk repeats itself.
        shown: what is traced: the least, and with a unit more of either part that is longer.
    """

    whole: Stacked
    units: Stacked
    shown: tuple[Stacked, ...]

    def steps(self) -> list[tuple[Stacked, float]]:
        """Of each part that is extrapolated: the stack with a unit more, and how many units the whole has more than
        the least."""
        least = self.shown[0]
        found = []
        for other in self.shown[1:]:
            part = 0 if other[0] > least[0] else 1
            found.append((other, (self.whole[part] - least[part]) / (other[part] - least[part])))
        return found


class Places:
    """The slots of a trace, by where they are."""

    def __init__(self, traced: Traced, chunks: int, stack: Stacked, units: Stacked):
        self.away: Bytes = {kind: traced.away.get(kind, 0) for kind in ("host", "disk")}
        self.bytes: dict[Any, Bytes] = {}
        self.slots = traced.slots
        self.chunks = chunks
        for slot in traced.slots:
            if slot.peak < 0:
                continue
            place = (
                slot.phase[0],
                slot.what,
                _in_stack(slot.phase[1], stack, units),
                _in_stack(slot.layer, stack, units),
                _from_ends(slot.chunk, chunks, 2),
            )
            other = self.bytes.get(place)
            if other is None or sum(other.values()) < slot.peak:
                self.bytes[place] = slot.bytes

    def work(self, phase: str, count: int, last: float, grows: bool) -> Work:
        """What a phase computes over `count` chunks, the last of which is `last` of a whole one.

        Args:
            grows: whether each chunk sees more than the one before.
        """
        groups: dict[tuple[str, int], dict[int, Work]] = {}
        total = Work()
        for slot in self.slots:
            if slot.phase[0] != phase:
                continue
            chunks = groups.setdefault((slot.what, slot.layer), {})
            # Prologue and epilogue are told apart by their order alone.
            index = slot.chunk if slot.chunk >= 0 else len(chunks)
            chunks[index] = chunks[index].plus(slot.work) if index in chunks else slot.work
        missing = count - self.chunks
        for (what, _), chunks in groups.items():
            for work in chunks.values():
                total.add(work)
            if missing <= 0 or what == "rest" or len(chunks) < 4:
                continue
            keys = sorted(chunks)
            full, before = chunks[keys[-2]], chunks[keys[-4]]
            # Over two chunks: blocks of keys are often filled by every other one.
            step = full.plus(before.scaled(-1)).scaled(0.5)
            # Chunks chunks-1 .. count-2 are whole, and the last one moves that much further from its past.
            if not grows:
                some = [chunks[key] for key in keys[:-1]]
                total.add(functools.reduce(Work.plus, some).scaled(missing / len(some)))
                continue
            total.add(full.scaled(missing))
            total.add(step.scaled(missing * (missing + 1) / 2 + missing * last))
        return total


def _in_stack(layer: int, stack: Stacked, units: Stacked) -> Any:
    """A layer's part, and its place there."""
    if layer < 0:
        return None
    part = 0 if layer < stack[0] else 1
    return part, _from_ends(layer - part * stack[0], stack[part], units[part] + stack[part] % units[part])


def _from_ends(index: int, count: int, tail: int) -> Any:
    """A place counted from the end where it is near it, else from the start where it is near that."""
    if index < 0:
        return None
    if count - index <= tail:
        return index - count
    return index if index < tail else "between"


def extrapolated(
    found: dict[tuple[int, Stacked], Places], counts: list[int], count: int, stacks: Stacks, filling: int
) -> dict[Any, Bytes]:
    common = set.intersection(*(set(places.bytes) for places in found.values()))
    whole = {
        place: linear({k: p.bytes[place] for k, p in found.items()}, counts, count, stacks, filling) for place in common
    }
    # Layers that are neither first nor last are in the deeper stacks alone. In the whole stack one of them is beside
    # the last (where boundaries are most) and one beside the first (where gradients are): each grows as its neighbour.
    for stack in stacks.shown[1:] or stacks.shown:
        shown = found[counts[-1], stack].bytes
        for place, size in shown.items():
            if place in common:
                continue
            grown = [
                {name: max(0, size[name] + whole[end][name] - shown[end][name]) for name in size}
                for end in (_at_end(place, 0), _at_end(place, -1))
                if end in whole
            ]
            if grown:
                whole[place] = max(grown, key=lambda b: sum(b.values()))
    return whole


def _at_end(place: Any, end: int) -> Any:
    """The place with its layers that are between moved to one end of their part."""
    return tuple(
        (part[0], end) if i in (2, 3) and part is not None and part[1] == "between" else part
        for i, part in enumerate(place)
    )


def linear(
    values: dict[tuple[int, Stacked], Bytes], counts: list[int], count: int, stacks: Stacks, filling: int
) -> Bytes:
    """Values at `count` chunks in the whole stack, from those at some counts in shorter stacks.

    Args:
        filling: chunks by which the longest trace falls short of filling a block of keys.
    """

    def at(n: int, stack: Stacked) -> Callable[[str], int]:
        return lambda name: values[n, stack].get(name, 0)

    names = {name for value in values.values() for name in value}
    n0, n1 = counts[0], counts[-1]
    further = (count - n0) if len(counts) > 1 else 0
    found = {}
    for name in sorted(names):
        if name == "cell":
            # A chunk's own tensors are as many in any row once its past fills a block; which of the last blocks are
            # whole differs from one count of chunks to the next.
            found[name] = max(value.get(name, 0) for value in values.values())
            if filling:
                step = max(at(n1, stack)(name) - at(n0, stack)(name) for stack in stacks.shown)
                found[name] += max(0, filling * step)
            continue
        long = {s: _along(at(n0, s)(name), at(n1, s)(name), further, count / n1) for s in stacks.shown}
        least = long[stacks.shown[0]]
        found[name] = max(0, round(least + sum(units * (long[more] - least) for more, units in stacks.steps())))
    return found


def _along(shorter: int, longer: int, steps: int, ratio: float) -> float:
    """A class of bytes at a place, some steps of a chunk beyond the shorter row (`ratio` times the longer one).

    A place's peak may come at another moment in the longer row. What is there in that one alone has come with the
    moment: it is as many times more as the row.
    """
    return longer * ratio if longer and not shorter else shorter + steps * (longer - shorter)


def longer(places: list[Places], phase: str, count: int, last: float, grows: bool) -> Work:
    """A phase's work over `count` chunks, from traces of one or two counts."""
    total = places[-1].work(phase, count, last, grows)
    if len(places) > 1:
        before, after = (
            sum((s.work for s in p.slots if s.phase[0] == phase and s.what == "rest"), Work()) for p in places
        )
        total.add(after.plus(before.scaled(-1)).scaled(count - places[-1].chunks))
    return total


def deeper(works: list[Work], stacks: Stacks) -> Work:
    total = Work().plus(works[0])
    for (_, units), work in zip(stacks.steps(), works[1:], strict=True):
        total.add(work.plus(works[0].scaled(-1)).scaled(units))
    return total
