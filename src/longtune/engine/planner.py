"""The choice of a plan: the fastest walk whose predicted bytes fit a budget.

A `Planner` knows one model on one device. It predicts any plan for any row (`predict`), looks for the fastest that fits
(`choose`), and says how long a row may be (`largest_row`). What a walk takes comes from `forecast`, what hardware makes
of it from `cost`, and the plans to try from `candidates`; here are the terms that a walk doesn't see (weights,
optimiser, the process, slack) and the search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from longtune.engine import cost, devices
from longtune.engine.budget import CONTEXT, Budget
from longtune.engine.candidates import KEEPS, Candidates
from longtune.engine.devices import Device
from longtune.engine.engine import Engine
from longtune.engine.forecast import Forecast, Forecaster, Row
from longtune.engine.plan import Plan
from longtune.engine.trace import Ghost, stored_bytes
from longtune.tree import Forest

_SLACK = {"cuda": (0.08, 0.06), "cpu": (0.44, 0.35)}
"""Share that an allocator holds beyond what is asked of it: of what comes and goes, of kept activations. On a CPU the
C library keeps much of what is freed, and the peak of a process counts it (measured by bench/planner_cpu.py). Of kept
activations it is a fifth to two fifths, another in each process: what is freed between them fits little that comes."""

_LEAST_SLACK = {"cuda": 128 << 20}
"""Bytes of slack at least: small budgets are used up by what lies between a few blocks (a walk of 0.6 GiB held 0.16 GiB
more than it had asked for, bench/planner_h200.py)."""

_SPREAD = 0.03
"""Share by which a process may come out above its prediction: it is right on the average (bench/planner_cpu.py)."""

_SCRATCH = {"cuda": 72 << 20, "cpu": 4 << 20}
"""Workspaces of matrix libraries."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan takes for one row.

    Attributes:
        plan: the plan.
        tokens: of the row.
        terms: bytes by what they are for; their sum is `peak_bytes` (on CUDA apart from `slack`, `host` and `disk`).
        peak_bytes: of the device (`torch.cuda.max_memory_allocated`), or of the process on a CPU.
        needed_bytes: what a budget must hold: the peak, slack, and the device's context.
        seconds: of one micro-batch.
        compiled: the same with the layers through `torch.compile`; the bytes are then these at most.
        phases: peak of each phase of the walk, above weights and optimiser.
    """

    plan: Plan
    tokens: int
    terms: dict[str, int]
    peak_bytes: int
    needed_bytes: int
    host_bytes: int
    disk_bytes: int
    seconds: cost.Seconds
    compiled: cost.Seconds
    phases: dict[str, int]

    def fits(self, budget: Budget) -> bool:
        return self.needed_bytes <= budget.device and self.host_bytes <= budget.host and self.disk_bytes <= budget.disk

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "tokens": self.tokens,
            "terms": self.terms,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "seconds_compiled": self.compiled.total,
            "phases": self.phases,
        }


class Planner:
    """Plans for one model on one device.

    Args:
        model: with its adapter, as `Engine` takes it; it may be on the meta device.
        device: where it will run.
        like: an engine of the real model, if there is one.
        accumulate: micro-batches of an optimiser step.
        one_pass: the objective's cotangents are known before its log-probs (supervised fine-tuning).
        process: bytes of this process without the model (on a CPU); None measures them, with the model in memory
            unless it is on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        *,
        like: Engine | None = None,
        accumulate: int = 1,
        one_pass: bool = True,
        process: int | None = None,
    ):
        self.device = device
        self.one_pass = one_pass
        self.forecaster = Forecaster(Ghost(model, device.attention, device.kind, like))
        self.unchunkable = self.forecaster.ghost.known.unchunkable
        grain = 512 if device.kind == "cuda" else 1
        trained = [p for p in model.parameters() if p.requires_grad]
        own = {id(p) for p in trained}
        held = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in own]
        adapters = stored_bytes(trained, grain)
        wide = sum(p.numel() * max(4, p.element_size()) for p in trained)
        self.terms: dict[str, int] = {
            "weights": stored_bytes(held, grain),
            "adapters": adapters,
            "optimiser": 2 * adapters,
            # Sums of a walk are in its trace; those of earlier micro-batches wait in `.grad`.
            "gradients": wide if accumulate > 1 else 0,
        }
        if device.kind == "cpu":
            there = 0 if next(model.parameters()).is_meta else self.terms["weights"] + adapters
            self.terms["process"] = max(0, devices.resident() - there) if process is None else process
        self._known: dict[Any, Prediction] = {}

    def close(self) -> None:
        self.forecaster.close()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # prediction

    def predict(self, plan: Plan, row: Forest | Row) -> Prediction:
        """What a plan takes for a row."""
        shape = Row.of(row)
        key = (plan, shape)
        if key not in self._known:
            self._known[key] = self._predict(plan, row, shape)
        return self._known[key]

    def _predict(self, plan: Plan, row: Forest | Row, shape: Row) -> Prediction:
        if plan.boundary_store == "disk":
            # The same walk as with the host, but for where boundaries go: all but the flow, one residual.
            forecast = self.forecaster.forecast(replace(plan, boundary_store="host"), row, self.one_pass)
            flow = min(forecast.away.get("host", 0), self._residual(shape.tokens))
            away = {"host": flow, "disk": max(0, forecast.away.get("host", 0) - flow)}
            forecast = replace(forecast, away=away)
        else:
            forecast = self.forecaster.forecast(plan, row, self.one_pass)
        return self._complete(plan, shape.tokens, forecast)

    def _residual(self, tokens: int) -> int:
        stack = self.forecaster.ghost.known.stack
        return tokens * stack.model.config.get_text_config().hidden_size * stack.dtype.itemsize

    def _complete(self, plan: Plan, tokens: int, forecast: Forecast) -> Prediction:
        kind = self.device.kind
        walk = forecast.bytes
        terms = {name: size for name, size in self.terms.items() if size}
        for name, size in walk.items():
            if size:
                terms[name] = terms.get(name, 0) + size
        host, disk = forecast.away.get("host", 0), forecast.away.get("disk", 0)
        terms["scratch"] = _SCRATCH.get(kind, 0)
        if kind == "cpu" and host:
            terms["host"] = host
        peak = sum(terms.values())
        moving, keeping = _SLACK.get(kind, _SLACK["cuda"])
        kept = walk.get("kept", 0)
        slack = max(int(moving * (sum(walk.values()) - kept) + keeping * kept), _LEAST_SLACK.get(kind, 0))
        context = CONTEXT if kind == "cuda" else 0
        terms["slack"] = slack
        if kind == "cpu":
            peak, slack = peak + slack, int(_SPREAD * (peak + slack))
        else:
            terms |= {name: size for name, size in (("host", host), ("disk", disk)) if size}
        return Prediction(
            plan=plan,
            tokens=tokens,
            terms=terms,
            peak_bytes=peak,
            needed_bytes=peak + slack + context,
            host_bytes=0 if kind == "cpu" else host,
            disk_bytes=disk,
            seconds=cost.seconds(forecast, self.device),
            compiled=cost.seconds(forecast, self.device, compiled=self.device.kind == "cuda"),
            phases=forecast.phases,
        )

    # choice

    @property
    def _candidates(self) -> Candidates:
        return Candidates(self.device.kind, self.forecaster.ghost.layers, self.unchunkable is None)

    def choose(self, row: Forest | Row, budget: Budget, fixed: Mapping[str, Any] | None = None) -> Prediction | None:
        """The fastest plan that fits; None if none does.

        Args:
            fixed: keys of the plan that are given.
        """
        shape = Row.of(row)
        fixed = dict(fixed or {})
        found: list[Prediction] = []
        for keep in [fixed["keep"]] if "keep" in fixed else KEEPS:
            if keep == "nothing" and any(_is_ample(p) for p in found):
                break
            for ladder in self._candidates.ladders(shape.tokens, keep, fixed):
                fastest = min(found, key=lambda p: p.seconds.total, default=None)
                if fastest is not None and not fastest.seconds.copies:
                    # What comes next moves more, or makes more again: with smaller chunks it would be slower.
                    ladder = [p for p in ladder if _chunk(p, shape.tokens) >= _chunk(fastest.plan, shape.tokens)]
                best = self._fastest_of(ladder, row, budget, fastest.seconds.total if fastest else math.inf)
                if best is not None:
                    found.append(best)
                    if _is_ample(best):
                        break
            if found and found[-1].plan.keep == "everything":
                break
        best = min(found, key=lambda p: p.seconds.total, default=None)
        may_keep = "keep_layers" not in fixed and fixed.get("keep", KEEPS[0]) in KEEPS[:2]
        if may_keep and (best is not None or "keep" in fixed):
            best = self._with_some_kept(best, row, shape, budget, fixed)
        if best is None and (least := self.smallest(row, budget, fixed)).fits(budget):
            return least  # What is said to fit is found.
        return best

    def _with_some_kept(
        self, best: Prediction | None, row: Forest | Row, shape: Row, budget: Budget, fixed: Mapping[str, Any]
    ) -> Prediction | None:
        """The best of a plan that keeps the same of all layers and those that keep more of the last ones."""
        base = best
        if base is None:
            # What is to be kept was given, and doesn't fit for all layers.
            base = self.choose(row, budget, {**fixed, "keep": "nothing"})
        if base is None or base.plan.keep == "everything":
            return best
        room = budget.device - base.needed_bytes
        for ladder in self._candidates.partly(base.plan, shape.tokens, fixed):
            if ladder[0].keep == "everything" and room < self._least_kept(base):
                continue
            before: Prediction | None = None
            for plan in ladder:
                some = self._with_most_layers(plan, row, budget)
                if before is not None and (some is None or some.seconds.total >= before.seconds.total):
                    break  # What smaller chunks leave room for is not worth it.
                before = some
                if some is not None and (best is None or some.seconds.total < best.seconds.total):
                    best = some
        return best

    @staticmethod
    def _least_kept(base: Prediction) -> float:
        """Bytes that the activations of a layer take at least: half of a cell in work is its gradients."""
        return 0.3 * base.terms.get("cell", 0) * base.tokens / _chunk(base.plan, base.tokens)

    def _with_most_layers(self, plan: Plan, row: Forest | Row, budget: Budget) -> Prediction | None:
        """The plan for as many of the last layers as fit: bytes grow with them."""
        found: Prediction | None = None
        low, high = 1, self.forecaster.ghost.layers
        while low < high:
            middle = (low + high) // 2
            prediction = self.predict(replace(plan, keep_layers=middle), row)
            if prediction.fits(budget):
                found, low = prediction, middle + 1
            else:
                high = middle
        return found

    def _fastest_of(
        self, plans: list[Plan], row: Forest | Row, budget: Budget, below: float = math.inf
    ) -> Prediction | None:
        """The first that fits of plans whose chunks, and so their speed and memory, only get smaller; None where none
        fits, or none that does takes less than `below` seconds."""
        tried: dict[int, Prediction] = {}
        low, high = 0, len(plans)
        while low < high:
            place = self._guess(plans, tried, low, high, budget)
            prediction = tried[place] = self.predict(plans[place], row)
            if prediction.fits(budget):
                high = place
            elif prediction.seconds.total >= below:
                return None  # Smaller chunks are slower still.
            elif prediction.host_bytes > budget.host or prediction.disk_bytes > budget.disk:
                return None  # Smaller chunks don't change that.
            elif prediction.needed_bytes - self._shrinking(prediction) > budget.device:
                return None  # Nor this.
            else:
                low = place + 1
        return tried.get(high)

    def _shrinking(self, prediction: Prediction) -> int:
        """Bytes of a plan that smaller chunks may save at most, with the slack that is theirs."""
        kind = self.device.kind
        found = sum(prediction.terms.get(name, 0) for name in _SHRINKING)
        slack = prediction.terms.get("slack", 0) - _LEAST_SLACK.get(kind, 0)
        found += max(0, min(math.ceil(_SLACK.get(kind, _SLACK["cuda"])[0] * found), slack))
        return math.ceil((1 + _SPREAD) * found) if kind == "cpu" else found

    def _guess(self, plans: list[Plan], tried: dict[int, Prediction], low: int, high: int, budget: Budget) -> int:
        """Where to look next between a plan that is too large (before `low`) and one that fits (`high`): a chunk's own
        bytes are about proportional to it."""
        if not tried:
            return (
                low if len(plans) < 4 else min(range(low, high), key=lambda i: abs((plans[i].chunk_tokens or 0) - 8192))
            )
        known = [tried[i] for i in (low - 1, high) if i in tried]
        last = known[0]
        at = _chunk(last.plan, last.tokens)
        each = self._shrinking(last) / at
        if len(known) == 2 and (other := _chunk(known[1].plan, last.tokens)) < at:
            each = (last.needed_bytes - known[1].needed_bytes) / (at - other)
        for place in range(low, high):
            if last.needed_bytes + each * (_chunk(plans[place], last.tokens) - at) <= budget.device:
                return place
        return high - 1 if len(known) == 2 else (low + high) // 2

    def smallest(self, row: Forest | Row, budget: Budget, fixed: Mapping[str, Any] | None = None) -> Prediction:
        """Of the plans that fit host and disk, the one that needs the fewest device bytes (of all, where none fits)."""
        shape = Row.of(row)
        found = []
        for plan in self._candidates.tight(shape.tokens, dict(fixed or {})):
            found.append(self.predict(plan, row))
            if found[-1].fits(budget):
                return found[-1]
        roomy = [p for p in found if p.host_bytes <= budget.host and p.disk_bytes <= budget.disk]
        return min(roomy or found, key=lambda p: p.needed_bytes)

    def largest_row(self, budget: Budget, fixed: Mapping[str, Any] | None = None) -> int:
        """Tokens of the longest single row that some plan fits, to about 2%; 0 if none does."""
        fixed = dict(fixed or {})
        most = 0
        for plan in self._candidates.tight(_LONG, fixed):
            found, bound = self._reach(plan, budget)
            most = max(most, found)
            if bound == "needed_bytes":
                break  # Another home for boundaries, or fewer of them, would not help.
        if most >= _LONG:
            return most
        low, high = 0, _LONG
        while high - low > max(16, low // 50):
            middle = (low + high) // 2
            low, high = (middle, high) if self.smallest(Row(middle), budget, fixed).fits(budget) else (low, middle)
        return low

    def _reach(self, plan: Plan, budget: Budget) -> tuple[int, str]:
        """Tokens that a plan reaches (everything is linear in a long row), and what ends there."""
        if plan.chunk_tokens is None:
            return 0, ""
        short, long = (self.predict(plan, Row(tokens)) for tokens in (_LONG, 2 * _LONG))
        limits = []
        for name, most in (("needed_bytes", budget.device), ("host_bytes", budget.host), ("disk_bytes", budget.disk)):
            start, step = getattr(short, name), getattr(long, name) - getattr(short, name)
            if start > most:
                return 0, name
            if step > 0:
                limits.append((int(_LONG * (1 + (most - start) / step)), name))
        reach, name = min(limits, default=(0, ""))
        return reach // 1024 * 1024, name


_LONG = 65536
_SHRINKING = ("cell", "head", "flow", "prologue")
"""What takes less, or may move off the device, with smaller chunks."""
_AMPLE = 4096


def _chunk(plan: Plan, tokens: int) -> int:
    """Tokens of a plan's chunks of a row."""
    return min(plan.chunk_tokens or tokens, tokens)


def _is_ample(prediction: Prediction) -> bool:
    """Whether a plan's chunks are large enough that larger ones, with less kept, would not be faster."""
    chunk = prediction.plan.chunk_tokens
    return chunk is None or chunk >= min(_AMPLE, prediction.tokens)
