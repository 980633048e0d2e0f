"""What a plan takes on a long row through a deep stack, from traces of shorter rows through fewer layers.

A walk repeats itself: one more chunk, or one more period of layers, adds the same to what lives at every place of the
walk (counted from either end), once a few of them are there. So a place's bytes are linear in both, places are
extrapolated one by one, and only then is the largest taken. Where the last layers keep something else than those below
them, a stack has two parts, which are extrapolated each for itself. Rows of few chunks, and stacks that don't repeat
(layers that share keys and values), are traced as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from longtune.engine.meter import Bytes
from longtune.engine.plan import Plan
from longtune.engine.trace import Ghost, Traced
from longtune.engine.workspace import Work
from longtune.tree import Forest, Tree

PHASES = ("prologue", "forward", "head", "backward")

_MOST = 12
"""Chunks of the shorter trace at most: small chunks would fill a block of keys only after very many."""

_MIXED = 20
"""The same where a row holds several examples: chunks meet them at different places."""

_FEWEST = 5
"""Chunks of the shorter trace at least: first two, last two, and one between."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one micro-batch takes beyond weights and optimiser.

    Attributes:
        bytes: device bytes by class (`meter.CLASSES`) at the peak.
        phases: device bytes at the peak of each phase of the walk.
        away: bytes by where they are off the device ("host", "disk").
        work: by phase.
        traces: how many walks were watched for it.
    """

    bytes: Bytes
    phases: Bytes
    away: Bytes
    work: dict[str, Work]
    traces: int

    @property
    def peak(self) -> int:
        return sum(self.bytes.values())


class Forecaster:
    """Forecasts for one model on one kind of device.

    Args:
        ghost: the model.
    """

    def __init__(self, ghost: Ghost):
        self.ghost = ghost
        self._short: dict[int, Ghost] = {}
        self._known: dict[Any, Forecast] = {}
        self._places: dict[Any, _Places] = {}
        self.period = _period(ghost)

    def close(self) -> None:
        for ghost in (self.ghost, *self._short.values()):
            ghost.close()

    def forecast(self, plan: Plan, row: Forest | Row, one_pass: bool = True) -> Forecast:
        """What a micro-batch takes.

        Args:
            row: the micro-batch, or its shape.
            one_pass: as for `Ghost.trace`.
        """
        shape = Row.of(row)
        plan = self._plain(plan)
        key = (plan, shape, one_pass)
        if key not in self._known:
            self._known[key] = self._forecast(plan, row, shape, one_pass)
        return self._known[key]

    def _plain(self, plan: Plan) -> Plan:
        """The plan without `keep_layers` where that says nothing."""
        if plan.keep_layers is not None and plan.keep != plan.keep_below and plan.keep_layers < self.ghost.layers:
            return plan
        return replace(plan, keep_layers=None, keep_below="nothing")

    def _forecast(self, plan: Plan, row: Forest | Row, shape: Row, one_pass: bool) -> Forecast:
        chunk = min(plan.chunk_tokens or shape.tokens, shape.tokens)
        count = -(-shape.tokens // chunk)
        rest = shape.tokens - (count - 1) * chunk
        stacks = self._stacks(plan)
        reach = min(self._reach(), shape.length or shape.tokens)
        filled = min(-(-4 * reach // chunk), max(-(-reach // chunk), 4)) + 2
        fewest = max(_FEWEST, min(filled, _MOST))
        if shape.length is not None:
            fewest = max(fewest, _MIXED)
        counts = [count] if count <= fewest + 1 else [fewest, fewest + 1]
        found: dict[tuple[int, Stacked], _Places] = {}
        for stack in stacks.shown:
            ghost = self._ghost(sum(stack))
            walked = replace(plan, keep_layers=stack[1] or None)
            for n in counts:
                part = shape.resized((n - 1) * chunk + rest)
                key = (walked, part, one_pass, stack)
                if key not in self._places:
                    traced = ghost.trace(
                        walked, row if isinstance(row, Forest) and n == count else part.forest(), one_pass
                    )
                    self._places[key] = _Places(traced, n, stack, stacks.units)
                found[n, stack] = self._places[key]
        filling = max(0, min(count, filled) - counts[-1])
        places = _extrapolated(found, counts, count, stacks, filling)
        worst = max(places.values(), key=lambda b: sum(b.values()))
        phases: Bytes = {}
        for (phase, *_), value in places.items():
            phases[phase] = max(phases.get(phase, 0), sum(value.values()))
        away = _linear({k: p.away for k, p in found.items()}, counts, count, stacks, 0)
        work = self._work(plan, shape, one_pass, found, counts, stacks)
        return Forecast(worst, phases, away, work, len(found))

    def _work(
        self,
        plan: Plan,
        shape: Row,
        one_pass: bool,
        found: dict[tuple[int, Stacked], _Places],
        counts: list[int],
        stacks: _Stacks,
    ) -> dict[str, Work]:
        """What each phase computes."""
        chunk = min(plan.chunk_tokens or shape.tokens, shape.tokens)
        count = -(-shape.tokens // chunk)
        length = shape.length
        if length is not None and len(counts) > 1 and length > (counts[0] - 2) * chunk:
            # Long examples end to end: each of them is a long row.
            one = self.forecast(plan, Row(min(length, shape.tokens), shape.trained), one_pass)
            return {phase: work.scaled(shape.tokens / min(length, shape.tokens)) for phase, work in one.work.items()}
        last = shape.tokens / chunk - (count - 1)
        work = {
            phase: _deeper(
                [_longer([found[n, s] for n in counts], phase, count, last, length is None) for s in stacks.shown],
                stacks,
            )
            for phase in PHASES
        }
        # Every pair that was computed on the way forward, in a layer that is walked back, is differentiated once.
        shown = found[counts[-1], stacks.shown[-1]]
        once, back = (sum(getattr(s.work, name) for s in shown.slots if s.phase[0] == name) for name in PHASES[1::2])
        work["backward"].backward = work["forward"].forward * back / max(once, 1)
        return work

    def _reach(self) -> int:
        """Keys beyond which a chunk's attention takes no more memory than before."""
        return int(getattr(self.ghost.known.port.attention, "block_keys", 8192))

    def _stacks(self, plan: Plan) -> _Stacks:
        layers = self.ghost.layers
        upper = plan.keep_layers or 0
        whole = (layers - upper, upper)
        if self.period is None:
            return _Stacks(whole, (layers, layers), (whole,))
        segment = self.period if plan.layers_per_segment is None else math.lcm(self.period, plan.layers_per_segment)
        # Layers that keep everything have no segments.
        units = (segment, self.period if plan.keep == "everything" else segment)
        few: list[list[int]] = []
        for size, unit in zip(whole, units, strict=True):
            more = size % unit + 3 * unit
            few.append([size] if more >= size else [more - unit, more])
        least = (few[0][0], few[1][0])
        shown = [least]
        if len(few[0]) > 1:
            shown.append((few[0][1], least[1]))
        if len(few[1]) > 1:
            shown.append((least[0], few[1][1]))
        return _Stacks(whole, units, tuple(shown))

    def _ghost(self, depth: int) -> Ghost:
        if depth == self.ghost.layers:
            return self.ghost
        if depth not in self._short:
            self._short[depth] = self.ghost.short(depth)
        return self._short[depth]


@dataclass(frozen=True, slots=True)
class Row:
    """The shape of a micro-batch.

    Attributes:
        tokens: of the row.
        trained: how many of a hundred are trained.
        length: tokens of an example that a token is in, on the average, where the row holds several; examples that are
            all of this length have as many query-key pairs.
    """

    tokens: int
    trained: int = 100
    length: int | None = None

    @classmethod
    def of(cls, forest: Forest | Row) -> Row:
        """The shape of a row; a shape is its own."""
        if isinstance(forest, Row):
            return forest
        sizes = [tree.size for tree in forest.trees]
        length = None if len(sizes) == 1 else round(sum(n * n for n in sizes) / forest.size)
        return cls(forest.size, min(100, -(-100 * len(forest.targets) // forest.size)), length)

    def resized(self, tokens: int) -> Row:
        return replace(self, tokens=tokens)

    def forest(self) -> Forest:
        """A row of this shape."""
        weights = torch.zeros(self.tokens)
        weights[(torch.arange(self.tokens) * 37) % 100 < self.trained] = 1
        weights[-1] = 1
        length = self.length or self.tokens
        ids = torch.zeros(self.tokens, dtype=torch.int64)
        return Forest(
            [Tree.sequence(ids[i : i + length], weights[i : i + length]) for i in range(0, self.tokens, length)]
        )


Stacked = tuple[int, int]
"""Layers of a stack: those below, and the last ones, which keep something else (0 where all keep the same)."""


@dataclass(frozen=True, slots=True)
class _Stacks:
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


class _Places:
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


def _extrapolated(
    found: dict[tuple[int, Stacked], _Places], counts: list[int], count: int, stacks: _Stacks, filling: int
) -> dict[Any, Bytes]:
    common = set.intersection(*(set(places.bytes) for places in found.values()))
    whole = {
        place: _linear({k: p.bytes[place] for k, p in found.items()}, counts, count, stacks, filling)
        for place in common
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


def _linear(
    values: dict[tuple[int, Stacked], Bytes], counts: list[int], count: int, stacks: _Stacks, filling: int
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


def _longer(places: list[_Places], phase: str, count: int, last: float, grows: bool) -> Work:
    """A phase's work over `count` chunks, from traces of one or two counts."""
    total = places[-1].work(phase, count, last, grows)
    if len(places) > 1:
        before, after = (
            sum((s.work for s in p.slots if s.phase[0] == phase and s.what == "rest"), Work()) for p in places
        )
        total.add(after.plus(before.scaled(-1)).scaled(count - places[-1].chunks))
    return total


def _deeper(works: list[Work], stacks: _Stacks) -> Work:
    total = Work().plus(works[0])
    for (_, units), work in zip(stacks.steps(), works[1:], strict=True):
        total.add(work.plus(works[0].scaled(-1)).scaled(units))
    return total


def _period(ghost: Ghost) -> int | None:
    """Layers after which the stack repeats itself; None if it doesn't (or layers share keys and values)."""
    structure = ghost.known.structure
    if any(donor not in (None, layer) for layer, donor in enumerate(structure.donors)):
        return None
    stack = ghost.known.stack
    if any(p.requires_grad for p in stack.outer_parameters):
        return None
    kinds = [_kind(layer) for layer in stack.layers]
    for period in range(1, min(8, len(kinds) // 2) + 1):
        if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
            return period
    return None


_TELLING = ("sliding_window", "is_sliding", "attention_type", "layer_type", "window_size", "p")


def _kind(layer: nn.Module) -> Any:
    modules = [
        (name, type(m).__name__, m.training, *(getattr(m, x, None) for x in _TELLING))
        for name, m in layer.named_modules()
    ]
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return str(modules), str(parameters)
