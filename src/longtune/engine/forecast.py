"""What a plan takes on a long row through a deep stack, from traces of shorter rows through fewer layers.

Here is chosen what to trace: rows of some chunks through some periods of layers. Places of the walk are then
extrapolated one by one (`extrapolate.py`), and only then is the largest taken. Rows of few chunks, and stacks that
don't repeat (layers that share keys and values), are traced as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from longtune.engine.extrapolate import Places, Stacked, Stacks, deeper, extrapolated, linear, longer
from longtune.engine.meter import Bytes
from longtune.engine.plan import Plan
from longtune.engine.trace import Ghost
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
        self._places: dict[Any, Places] = {}
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
        found: dict[tuple[int, Stacked], Places] = {}
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
                    self._places[key] = Places(traced, n, stack, stacks.units)
                found[n, stack] = self._places[key]
        filling = max(0, min(count, filled) - counts[-1])
        places = extrapolated(found, counts, count, stacks, filling)
        worst = max(places.values(), key=lambda b: sum(b.values()))
        phases: Bytes = {}
        for (phase, *_), value in places.items():
            phases[phase] = max(phases.get(phase, 0), sum(value.values()))
        away = linear({k: p.away for k, p in found.items()}, counts, count, stacks, 0)
        work = self._work(plan, shape, one_pass, found, counts, stacks)
        return Forecast(worst, phases, away, work, len(found))

    def _work(
        self,
        plan: Plan,
        shape: Row,
        one_pass: bool,
        found: dict[tuple[int, Stacked], Places],
        counts: list[int],
        stacks: Stacks,
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
            phase: deeper(
                [longer([found[n, s] for n in counts], phase, count, last, length is None) for s in stacks.shown],
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

    def _stacks(self, plan: Plan) -> Stacks:
        layers = self.ghost.layers
        upper = plan.keep_layers or 0
        whole = (layers - upper, upper)
        if self.period is None:
            return Stacks(whole, (layers, layers), (whole,))
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
        return Stacks(whole, units, tuple(shown))

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
