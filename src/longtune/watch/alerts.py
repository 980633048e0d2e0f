"""What a person should be told of a run without looking for it: pure functions of its state and its surroundings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longtune.watch.state import RunState
from longtune.watch.view import duration, number, pace, size

GIB = 1 << 30
SLOWEST_START = 1800.0
"""Seconds without an event before the first step (loading, reading data, references) that are nothing unusual."""
QUIET = 60.0
"""Seconds without an event that are never called a stall."""
STALL_FACTOR = 8.0
"""How many times the longest recent pause a pause must be, to be called a stall."""
RISE = 0.1
MEMORY_OVER = 0.05


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the machine says of a run at one moment.

    Attributes:
        now: seconds since the epoch.
        held: whether a process holds the run's lock; None where nobody can say.
        pid: that process.
        free_bytes: on the run's disk.
        checkpoint_bytes: of the newest checkpoint.
        predicted, measured: of plan.json; empty where there are none.
    """

    now: float = 0.0
    held: bool | None = None
    pid: int | None = None
    free_bytes: int | None = None
    checkpoint_bytes: int = 0
    predicted: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def predicted_peak(self) -> int | None:
        """Bytes that the plan promises to stay below."""
        peak = self.predicted.get("peak_bytes")
        return int(peak) if isinstance(peak, int | float) and math.isfinite(peak) and peak > 0 else None


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to know.

    Attributes:
        level: `error` (the run is over, or its result is in danger) or `warning`.
        kind: a word for programs.
        text: a line for people.
    """

    level: str
    kind: str
    text: str

    def as_dict(self) -> dict[str, str]:
        return {"level": self.level, "kind": self.kind, "text": self.text}


def patience(state: RunState) -> float:
    """Seconds without an event after which a run has stalled."""
    if not len(state.train) or not state.gaps:
        return SLOWEST_START
    return max(QUIET, STALL_FACTOR * max(state.gaps))


def silence(state: RunState, now: float) -> float:
    """Seconds since the newest event."""
    return max(0.0, now - state.last_t) if state.last_t is not None else 0.0


def status_of(state: RunState, around: Surroundings) -> str:
    """starting, running, done, failed, stopped, gone, or silent."""
    if state.end is not None:
        # A resumed run holds the lock while it still loads its model.
        again = state.end["event"] != "done" and around.held and silence(state, around.now) > QUIET / 10
        return "starting" if again else state.end["event"]
    if around.held is False:
        return "gone" if state.meta else "starting"
    if around.held is None and silence(state, around.now) > patience(state):
        return "silent"
    return "running" if len(state.train) else "starting"


def find_alerts(state: RunState, around: Surroundings) -> list[Alert]:
    """Everything that is worth a line, errors first."""
    found = [
        *_ended(state, around),
        *_stalled(state, around),
        *_nonfinite(state),
        *_disk(state, around),
        *_rising(state),
        *_memory(state, around),
    ]
    return sorted(found, key=lambda alert: alert.level != "error")


def _ended(state: RunState, around: Surroundings) -> list[Alert]:
    status = status_of(state, around)
    if status == "failed" and state.end is not None:
        return [Alert("error", "failed", f"failed at step {state.step}: {state.end.get('reason')}")]
    if status == "gone":
        return [Alert("error", "gone", f"no process writes this run any more (killed?); {_way_on(state)}")]
    return []


def _way_on(state: RunState) -> str:
    saved = [note.get("step") for note in state.notes if note["event"] == "checkpoint"]
    return f"go on from step {saved[-1]} with --resume" if saved else "no checkpoint was saved yet"


def _stalled(state: RunState, around: Surroundings) -> list[Alert]:
    quiet = silence(state, around.now)
    if state.end is not None or around.held is False or quiet <= patience(state):
        return []
    usual = f"; steps took {pace(state.seconds_per_step)}" if state.seconds_per_step else ""
    who = f"process {around.pid} holds the run but" if around.pid else "the run"
    return [Alert("error", "stalled", f"stalled: {who} has written nothing for {duration(quiet)}{usual}")]


def _nonfinite(state: RunState) -> list[Alert]:
    if not state.nonfinite:
        return []
    count = len(state.nonfinite)
    steps = "1 step" if count == 1 else f"{count:,} steps"
    return [Alert("error", "nonfinite", f"loss or gradient not finite at {steps}, last at step {state.nonfinite[-1]}")]


def _disk(state: RunState, around: Surroundings) -> list[Alert]:
    needed = max(GIB, 2 * around.checkpoint_bytes)
    if around.free_bytes is None or around.free_bytes >= needed or state.end is not None:
        return []
    return [Alert("error", "disk", f"disk nearly full: {size(around.free_bytes)} free, {size(needed)} wanted")]


def _rising(state: RunState) -> list[Alert]:
    found = []
    losses = state.train.column("loss")
    if rise := rising(losses):
        low, recent = rise
        found.append(Alert("warning", "rising", f"the loss is rising: {number(recent, 4)} after {number(low, 4)}"))
    best = state.best_validation
    last = state.validation.last("loss")
    if best is not None and last is not None and len(state.validation) > 1:
        step, loss = best
        if last - loss > RISE * abs(loss):
            text = f"validation is rising: {number(last, 4)}, best {number(loss, 4)} at step {step}"
            found.append(Alert("warning", "validation", text))
    return found


def rising(losses: np.ndarray) -> tuple[float, float] | None:
    """(lowest, newest) mean loss of a window, if the newest lies above by a tenth and by three standard errors.

    Args:
        losses: [steps]; NaN is passed over.
    """
    losses = losses[np.isfinite(losses)]
    window = int(np.clip(len(losses) // 8, 10, 200))
    count = len(losses) // window
    if count < 3:
        return None
    parts = losses[len(losses) - count * window :].reshape(count, window)
    means, errors = parts.mean(axis=1), parts.std(axis=1, ddof=1) / math.sqrt(window)
    lowest = int(np.argmin(means[:-1]))
    rise = means[-1] - means[lowest]
    if rise > RISE * abs(means[lowest]) and rise > 3 * math.hypot(errors[-1], errors[lowest]):
        return float(means[lowest]), float(means[-1])
    return None


def _memory(state: RunState, around: Surroundings) -> list[Alert]:
    peak, predicted = state.train.last("peak_bytes"), around.predicted_peak
    if peak is None or predicted is None or peak <= predicted * (1 + MEMORY_OVER):
        return []
    text = f"memory above the plan: {size(int(peak))} measured, {size(predicted)} predicted"
    return [Alert("warning", "memory", text)]
