"""What is known of a run from its events: fed with them one by one, it forgets what a resume made void.

The rules are those of `log.clean`: `resumed` at step s takes out ends, and every event of a later step. An event that
is not understood (a newer version's, or a broken line's) changes nothing. Files, locks and the clock belong to `runs`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from longtune.watch.log import ENDS
from longtune.watch.series import Table, smooth

Event = dict[str, Any]

RECENT = 50
"""Steps by which speed and remaining time are judged."""
KEPT_NOTES = 400
MANY = ("memory",)
"""Kinds that come several times a step on request; among the notes they would push out everything else."""
KEPT_SAMPLES = 64
SMOOTHING = 0.9
LARGEST_STEP = 1 << 53
"""Beyond it a double can't tell steps apart: the line is broken."""


class RunState:
    """A run's figures so far.

    Attributes:
        meta: the first event; empty before it.
        steps, step: steps in all (0: not known yet), and the newest one.
        train, validation: their metrics by step.
        notes: the newest events of all other kinds, for a list of what happened.
        samples: the newest events with sample answers, and the first; in order.
        end: the event that ended the run, if it has ended.
        last_t: seconds since the epoch of the newest event.
        gaps: seconds between the newest events since the run was last started.
    """

    def __init__(self):
        self.meta: Event = {}
        self.steps = self.step = 0
        self.train = Table()
        self.validation = Table()
        self.notes: deque[Event] = deque(maxlen=KEPT_NOTES)
        self.samples: list[Event] = []
        self.end: Event | None = None
        self.last_t: float | None = None
        self.gaps: deque[float] = deque(maxlen=RECENT)
        self.nonfinite: list[int] = []
        self._times: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)
        self._started: float | None = None
        self._spent = 0.0

    def update(self, event: Event) -> None:
        """One event, in the order of the file."""
        kind, step = event["event"], event.get("step", 0)
        if not isinstance(step, int) or not 0 <= step <= LARGEST_STEP:
            return
        if kind == "resumed":
            self._resume(step)
        self._clock(event, new_start=kind in ("meta", "resumed"))
        if kind in ("meta", "resumed") and isinstance(event.get("steps"), int):
            self.steps = event["steps"]
        if kind == "meta":
            self.meta = event
        elif kind == "train":
            self._train(step, event)
        elif kind == "validation":
            self.validation.append(step, event)
        elif kind == "samples":
            self.samples.append(event)
            if len(self.samples) > KEPT_SAMPLES:
                del self.samples[1]
        elif kind not in MANY:
            self.notes.append(event)
            if kind in ENDS:
                self.end = event

    def _train(self, step: int, event: Event) -> None:
        self.step = step
        self.train.append(step, event)
        if self.last_t is not None:
            self._times.append((step, self.last_t))
        # The writer puts null for a number that is not finite.
        if event.get("loss", 0.0) is None or event.get("grad_norm", 0.0) is None:
            self.nonfinite.append(step)

    def _resume(self, step: int) -> None:
        self.step = step
        self.train.cut(step)
        self.validation.cut(step)
        kept = [note for note in self.notes if note["event"] not in ENDS and note.get("step", 0) <= step]
        self.notes = deque(kept, maxlen=KEPT_NOTES)
        self.samples = [event for event in self.samples if event.get("step", 0) <= step]
        self.nonfinite = [at for at in self.nonfinite if at <= step]
        self.end = None
        self._times.clear()

    def _clock(self, event: Event, new_start: bool) -> None:
        t = event.get("t")
        if not isinstance(t, int | float):
            return
        if new_start:
            if self._started is not None and self.last_t is not None:
                self._spent += max(0.0, self.last_t - self._started)
            self._started = t
            self.gaps.clear()
        elif self.last_t is not None:
            self.gaps.append(max(0.0, t - self.last_t))
        self.last_t = float(t)

    @property
    def seconds_per_step(self) -> float | None:
        """Wall time of recent steps, validation and checkpoints among them included; None before the first."""
        if len(self._times) > 1:
            (first, since), (last, until) = self._times[0], self._times[-1]
            if last > first and until >= since:
                return (until - since) / (last - first)
        return self.train.last("seconds")

    @property
    def remaining(self) -> float | None:
        """Seconds to the last step by recent ones; None when that can't be said, 0 after the end."""
        if self.end is not None and self.end["event"] == "done":
            return 0.0
        pace = self.seconds_per_step
        return None if pace is None or not self.steps else max(0, self.steps - self.step) * pace

    @property
    def elapsed(self) -> float | None:
        """Seconds that the run has been at work, over all its starts."""
        if self._started is None or self.last_t is None:
            return None
        return self._spent + max(0.0, self.last_t - self._started)

    @property
    def smoothed_loss(self) -> float | None:
        """Exponential mean over about the last 20 steps."""
        smoothed = smooth(self.train.column("loss", 200), SMOOTHING)
        known = smoothed[np.isfinite(smoothed)]
        return float(known[-1]) if len(known) else None

    @property
    def best_validation(self) -> tuple[int, float] | None:
        """(step, loss) of the lowest validation loss."""
        losses = self.validation.column("loss")
        if not np.isfinite(losses).any():
            return None
        best = int(np.nanargmin(losses))
        return int(self.validation.steps()[best]), float(losses[best])

    @property
    def has_pairs(self) -> bool:
        """Whether the run trains on pairs of answers."""
        return "margin" in self.train.names or "margin" in self.validation.names
