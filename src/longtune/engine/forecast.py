"""What a plan takes on a long row through a deep stack, from traces of shorter rows through fewer layers.

A walk repeats itself: one more chunk, or one more period of layers, adds the same to what lives at every place of the
walk (counted from either end), once a few of them are there. So a place's bytes are linear in both, places are
extrapolated one by one, and only then is the largest taken. Rows of few chunks, and stacks that don't repeat (layers
that share keys and values, kept layers), are traced as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longtune.engine.plan import Plan
from longtune.engine.trace import Bytes, Ghost, Traced
from longtune.engine.workspace import Work
from longtune.tree import Forest, Tree

PHASES = ("prologue", "forward", "head", "backward")

_MOST = 12
"""Chunks of the shorter trace at most: small chunks would fill a block of keys only after very many."""

_FEWEST = 5
"""Chunks of the shorter trace at least: first two, last two, and one between."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one micro-batch takes beyond weights and optimiser.

    Attributes:
        bytes: device bytes by class (`trace.CLASSES`) at the peak.
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
        shape = row if isinstance(row, Row) else Row.of(row)
        key = (plan, shape, one_pass)
        if key not in self._known:
            self._known[key] = self._forecast(plan, row, shape, one_pass)
        return self._known[key]

    def _forecast(self, plan: Plan, row: Forest | Row, shape: Row, one_pass: bool) -> Forecast:
        chunk = min(plan.chunk_tokens or shape.tokens, shape.tokens)
        count = -(-shape.tokens // chunk)
        rest = shape.tokens - (count - 1) * chunk
        depths = self._depths(plan)
        filled = min(-(-4 * self._reach() // chunk), max(-(-self._reach() // chunk), 4)) + 2
        fewest = max(_FEWEST, min(filled, _MOST))
        counts = [count] if count <= fewest + 1 else [fewest, fewest + 1]
        found: dict[tuple[int, int], _Places] = {}
        for depth in depths:
            ghost = self._ghost(depth)
            for n in counts:
                part = shape.resized((n - 1) * chunk + rest)
                key = (plan, part, one_pass, depth)
                if key not in self._places:
                    traced = ghost.trace(
                        plan, row if isinstance(row, Forest) and n == count else part.forest(), one_pass
                    )
                    self._places[key] = _Places(traced, n, depth, self._tail(plan))
                found[n, depth] = self._places[key]
        layers = self.ghost.layers
        filling = max(0, min(count, filled) - counts[-1])
        places = _extrapolated(found, counts, depths, count, layers, filling)
        worst = max(places.values(), key=lambda b: sum(b.values()))
        phases: Bytes = {}
        for (phase, *_), value in places.items():
            phases[phase] = max(phases.get(phase, 0), sum(value.values()))
        away = _bilinear({k: p.away for k, p in found.items()}, counts, depths, count, layers, 0)
        work = {
            phase: _deeper(
                [_longer([found[n, d] for n in counts], phase, count, rest / chunk) for d in depths], depths, layers
            )
            for phase in PHASES
        }
        # Every pair that was computed on the way forward, in a layer that is walked back, is differentiated once.
        shown = found[counts[-1], depths[-1]]
        once, back = (sum(getattr(s.work, name) for s in shown.slots if s.phase[0] == name) for name in PHASES[1::2])
        work["backward"].backward = work["forward"].forward * back / max(once, 1)
        return Forecast(worst, phases, away, work, len(found))

    def _reach(self) -> int:
        """Keys beyond which a chunk's attention takes no more memory than before."""
        return int(getattr(self.ghost.known.port.attention, "block_keys", 8192))

    def _unit(self, plan: Plan) -> int | None:
        """Layers after which a walk repeats itself, or None."""
        if self.period is None or getattr(plan, "keep_layers", None) is not None:
            return None
        return self.period if plan.layers_per_segment is None else math.lcm(self.period, plan.layers_per_segment)

    def _tail(self, plan: Plan) -> int:
        """Layers at the end that are told apart by their distance from it."""
        unit = self._unit(plan)
        return self.ghost.layers if unit is None else unit + self.ghost.layers % unit

    def _depths(self, plan: Plan) -> list[int]:
        layers, unit = self.ghost.layers, self._unit(plan)
        if unit is None or (deeper := layers % unit + 3 * unit) >= layers:
            return [layers]
        return [deeper - unit, deeper]

    def _ghost(self, depth: int) -> Ghost:
        if depth == self.ghost.layers:
            return self.ghost
        if depth not in self._short:
            self._short[depth] = self.ghost.short(depth)
        return self._short[depth]


@dataclass(frozen=True, slots=True)
class Row:
    """The shape of a micro-batch: its tokens, and how many of a hundred are trained."""

    tokens: int
    trained: int = 100

    @classmethod
    def of(cls, forest: Forest) -> Row:
        return cls(forest.size, min(100, -(-100 * len(forest.targets) // forest.size)))

    def resized(self, tokens: int) -> Row:
        return Row(tokens, self.trained)

    def forest(self) -> Forest:
        """A row of this shape."""
        weights = torch.zeros(self.tokens)
        weights[(torch.arange(self.tokens) * 37) % 100 < self.trained] = 1
        weights[-1] = 1
        return Forest([Tree.sequence(torch.zeros(self.tokens, dtype=torch.int64), weights)])


class _Places:
    """The slots of a trace, by where they are."""

    def __init__(self, traced: Traced, chunks: int, depth: int, tail: int):
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
                _from_ends(slot.phase[1], depth, tail),
                _from_ends(slot.layer, depth, tail),
                _from_ends(slot.chunk, chunks, 2),
            )
            other = self.bytes.get(place)
            if other is None or sum(other.values()) < slot.peak:
                self.bytes[place] = slot.bytes

    def work(self, phase: str, count: int, last: float) -> Work:
        """What a phase computes over `count` chunks, the last of which is `last` of a whole one."""
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
            total.add(full.scaled(missing))
            total.add(step.scaled(missing * (missing + 1) / 2 + missing * last))
        return total


def _from_ends(index: int, count: int, tail: int) -> Any:
    """A place counted from the end where it is near it, else from the start where it is near that."""
    if index < 0:
        return None
    if count - index <= tail:
        return index - count
    return index if index < tail else "between"


def _extrapolated(
    found: dict[tuple[int, int], _Places], counts: list[int], depths: list[int], count: int, layers: int, filling: int
) -> dict[Any, Bytes]:
    common = set.intersection(*(set(places.bytes) for places in found.values()))
    whole = {
        place: _bilinear({k: p.bytes[place] for k, p in found.items()}, counts, depths, count, layers, filling)
        for place in common
    }
    # Layers that are neither first nor last are in the deeper stack alone. In the whole stack one of them is beside the
    # last (where boundaries are most) and one beside the first (where gradients are): each grows as its neighbour.
    n, depth = counts[-1], depths[-1]
    shown = found[n, depth].bytes
    for place, size in shown.items():
        if place in common:
            continue
        ends = [
            tuple(end if part == "between" and i in (2, 3) else part for i, part in enumerate(place)) for end in (0, -1)
        ]
        grown = [
            {name: max(0, size[name] + whole[end][name] - shown[end][name]) for name in size}
            for end in ends
            if end in whole
        ]
        if grown:
            whole[place] = max(grown, key=lambda b: sum(b.values()))
    return whole


def _bilinear(
    values: dict[tuple[int, int], Bytes], counts: list[int], depths: list[int], count: int, layers: int, filling: int
) -> Bytes:
    """Values at `count` chunks and `layers` layers, from those at some counts and depths.

    Args:
        filling: chunks by which the longest trace falls short of filling a block of keys.
    """

    def at(n: int, d: int) -> Callable[[str], int]:
        return lambda name: values[n, d].get(name, 0)

    names = {name for value in values.values() for name in value}
    n0, d0 = counts[0], depths[0]
    along = (count - n0) if len(counts) > 1 else 0
    down = (layers - d0) / (depths[1] - d0) if len(depths) > 1 else 0.0
    found = {}
    for name in sorted(names):
        if name == "cell":
            # A chunk's own tensors are as many in any row once its past fills a block; which of the last blocks are
            # whole differs from one count of chunks to the next.
            found[name] = max(value.get(name, 0) for value in values.values())
            if filling:
                step = max(at(counts[-1], d)(name) - at(n0, d)(name) for d in depths)
                found[name] += max(0, filling * step)
            continue
        first, last = (
            _along(at(n0, d)(name), at(counts[-1], d)(name), along, count / counts[-1]) for d in (d0, depths[-1])
        )
        found[name] = max(0, round(first + down * (last - first)))
    return found


def _along(shorter: int, longer: int, steps: int, ratio: float) -> float:
    """A class of bytes at a place, some steps of a chunk beyond the shorter row (`ratio` times the longer one).

    A place's peak may come at another moment in the longer row. What is there in that one alone has come with the
    moment: it is as many times more as the row.
    """
    return longer * ratio if longer and not shorter else shorter + steps * (longer - shorter)


def _longer(places: list[_Places], phase: str, count: int, last: float) -> Work:
    """A phase's work over `count` chunks, from traces of one or two counts."""
    total = places[-1].work(phase, count, last)
    if len(places) > 1:
        before, after = (
            sum((s.work for s in p.slots if s.phase[0] == phase and s.what == "rest"), Work()) for p in places
        )
        total.add(after.plus(before.scaled(-1)).scaled(count - places[-1].chunks))
    return total


def _deeper(works: list[Work], depths: list[int], layers: int) -> Work:
    if len(works) == 1:
        return works[0]
    return works[0].plus(works[1].plus(works[0].scaled(-1)).scaled((layers - depths[0]) / (depths[1] - depths[0])))


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
