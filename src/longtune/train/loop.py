"""The loop of optimiser steps: batches in, events and checkpoints out.

A step draws all its micro-batches, counts their totals, and only then runs the first backward, so the loss is the
one of the whole step however it is cut. The loop knows no model family and no method; the engine and the objective
do. Folders and their files belong to `run`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from longtune.config import TrainConfig
from longtune.data import Batcher
from longtune.engine import Engine
from longtune.objective.base import Objective, Totals
from longtune.train import measure, optimiser, schedule
from longtune.train.evaluate import Stopped, Validation, add_up
from longtune.train.events import EventLog
from longtune.train.stop import Stopper
from longtune.tree import Forest, Tree


class RunFailed(Exception):
    """The run can't go on; the message says at which step, why, and what can be done.

    Attributes:
        rows: the rows that it happened on.
    """

    def __init__(self, message: str, rows: Sequence[str] = ()):
        super().__init__(message)
        self.rows = list(rows)


@dataclass(slots=True)
class Progress:
    """What a run has done so far; saved with every checkpoint."""

    step: int = 0
    micro_batches: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    loss: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    validated: int = 0
    sampled: int = -1
    skipped_steps: list[int] = field(default_factory=list)
    trajectory: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Loop:
    """One run's steps.

    Attributes:
        train: the settings.
        steps: optimiser steps in all.
        micro_batches: micro-batches in all; the last step takes what is left.
        validate: measures on the held-out rows; None without them.
        save: writes a checkpoint of the loop's progress and returns its folder.
        sample: answers a few prompts and returns the fields of a `samples` event; None where nobody asked for it.
        replan: finds another plan after the device ran out of memory in a step, which is then taken once more.
        refer: gives a micro-batch its reference log-probs, where they aren't computed beforehand.
        last_checkpoint: the newest checkpoint; None before the first.
        saved_step: its step, 0 before the first.
    """

    train: TrainConfig
    engine: Engine
    objective: Objective
    optimiser: torch.optim.Optimizer
    batches: Batcher
    steps: int
    micro_batches: int
    device: torch.device
    events: EventLog
    stopper: Stopper
    validate: Callable[[], Validation] | None
    save: Callable[[Progress], Path]
    sample: Callable[[], dict[str, Any]] | None = None
    refer: Callable[[list[Tree]], list[Tree]] = lambda trees: trees
    replan: Callable[[int, str], None] | None = None
    progress: Progress = field(default_factory=Progress)
    last_checkpoint: Path | None = None
    saved_step: int = 0
    _peak: int = 0
    _unsaved_step: int | None = None
    _clock: float = field(default_factory=time.monotonic)

    def run(self) -> str | None:
        """Takes the steps that are left. Returns None when all are done, else why it stopped (and saved) early.

        Raises:
            RunFailed: a loss or norm that is not finite, with `on_nonfinite: stop`; or a checkpoint that can't be
                written, with `on_save_error: stop` or on the way out.
        """
        train, progress = self.train, self.progress
        warmup = schedule.warmup_length(self.steps, train.warmup_ratio, train.warmup_steps)
        batches = iter(self.batches)
        self._clock = time.monotonic()
        while True:
            # Also first of all: before the first step, or what a stopped run left out.
            self._measure()
            if train.save_every and progress.step % train.save_every == 0:
                if progress.step not in (self.saved_step, self._unsaved_step):
                    self._checkpoint()
            if (reason := self.stopper.reason) and (progress.step < self.steps or self._due()):
                if progress.step != self.saved_step:
                    self._checkpoint(leaving=True)
                return reason
            if progress.step == self.steps:
                self.count_time()
                return None
            start = time.perf_counter()
            step = progress.step + 1
            rate = schedule.factor(train.schedule, step, self.steps, warmup)
            optimiser.set_rates(self.optimiser, rate)
            self._step(step, self._draw(batches), start)
            progress.seconds += time.perf_counter() - start

    def peak_bytes(self) -> int:
        """Highest memory so far, that of sample answers left out where a device's peak can be set back."""
        return max(self._peak, measure.peak_bytes(self.device))

    def count_time(self) -> None:
        """Adds the time since the last call to the progress's wall time."""
        now = time.monotonic()
        self.progress.wall_seconds += now - self._clock
        self._clock = now

    def _due(self) -> list[Callable[[], None]]:
        """What is to be measured after the step that was taken last, and wasn't yet."""
        progress, every = self.progress, self.train.eval_every
        now = progress.step > 0 and every > 0 and (progress.step % every == 0 or progress.step == self.steps)
        due: list[Callable[[], None]] = []
        if self.validate is not None and now and progress.validated != progress.step:
            due.append(self._validate)
        if self.sample is not None and progress.sampled != progress.step:
            if now or progress.step in (0, self.steps):
                due.append(self._sample)
        return due

    def _measure(self) -> None:
        for work in self._due():
            try:
                work()
            except Stopped:
                return

    def _draw(self, batches: Iterator[list[Tree]]) -> list[Forest]:
        count = min(self.train.accumulate, self.micro_batches - self.progress.micro_batches)
        wanted = self.objective.uses_prompt_targets
        return [Forest(self.refer(next(batches)), prompt_targets=wanted) for _ in range(count)]

    def _step(self, step: int, forests: list[Forest], start: float) -> None:
        progress = self.progress
        totals = add_up([self.objective.totals(forest) for forest in forests])
        parts: list[dict[str, float]] = []
        suspects = forests
        for index, forest in enumerate(forests):
            parts.append(self._accumulate(step, forests[: index + 1], totals))
            if not math.isfinite(parts[-1]["loss"]):
                suspects = [forest]
                break
        metrics = self.objective.metrics(add_up(parts), totals)
        norm = optimiser.clip(self.optimiser, self.train.clip_norm)
        progress.step = step
        progress.micro_batches += len(forests)
        if math.isfinite(metrics["loss"]) and math.isfinite(norm):
            self.optimiser.step()
        else:
            self._not_finite(step, metrics["loss"], norm, suspects)
        self.optimiser.zero_grad(set_to_none=True)
        tokens = sum(forest.size for forest in forests)
        trained_tokens = sum(len(forest.targets) for forest in forests)
        progress.tokens += tokens
        progress.trained_tokens += trained_tokens
        progress.loss = metrics["loss"]
        seconds = time.perf_counter() - start
        self.events.emit(
            "train",
            step=step,
            **metrics,
            grad_norm=norm,
            learning_rate=self.optimiser.param_groups[0]["lr"],
            tokens=tokens,
            trained_tokens=trained_tokens,
            tokens_per_second=tokens / seconds,
            seconds=seconds,
            peak_bytes=self.peak_bytes(),
            active_bytes=measure.active_bytes(self.device),
        )

    def _accumulate(self, step: int, forests: list[Forest], totals: Totals) -> dict[str, float]:
        """The last of some micro-batches. If the device runs out of memory, all of them again under another plan."""
        last = len(forests) - 1
        try:
            return self.engine.accumulate(forests[last], self.objective, totals, key=(step, last))
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)
        # Out here the failed walk's frames, and what they hold, are gone. Its own gradients are not complete, and those
        # before it are made again with it.
        self.optimiser.zero_grad(set_to_none=True)
        if self.replan is None:
            raise failure
        self.replan(step, str(failure))
        parts = [
            self.engine.accumulate(forest, self.objective, totals, key=(step, index))
            for index, forest in enumerate(forests)
        ]
        return parts[-1]

    def take_peak(self) -> int:
        """Highest memory since the last call, where a device's peak can be set back; else so far."""
        peak = measure.peak_bytes(self.device)
        self._peak = max(self._peak, peak)
        measure.reset_peak(self.device)
        return peak

    def _not_finite(self, step: int, loss: float, norm: float, forests: list[Forest]) -> None:
        rows = [tree.row for forest in forests for tree in forest.trees]
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        if self.train.on_nonfinite == "skip":
            self.progress.skipped_steps.append(step)
            self.events.emit("warning", step=step, reason=f"{what}: no update was made", rows=rows)
            return
        saved = f"the last good checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "none was saved yet"
        shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        advice = "lower learning_rate, look at these rows, or set on_nonfinite: skip"
        raise RunFailed(f"step {step}: {what} (rows {shown}); {saved}; {advice}", rows)

    def _validate(self) -> None:
        assert self.validate is not None
        progress = self.progress
        found = self.validate().as_dict()
        progress.validated = progress.step
        progress.trajectory.append({"step": progress.step, **found})
        if math.isfinite(found["loss"]) and (progress.best_loss is None or found["loss"] < progress.best_loss):
            progress.best_step, progress.best_loss = progress.step, found["loss"]
        self.events.emit("validation", step=progress.step, **found)

    def _sample(self) -> None:
        assert self.sample is not None
        self._peak = self.peak_bytes()
        try:
            found = self.sample()
        except Stopped:
            raise
        except Exception as error:
            # Answers are for a reader: they are not worth the run.
            reason = f"no sample answers ({type(error).__name__}: {' '.join(str(error).split())}); none are tried again"
            self.sample = None
            self.events.emit("warning", step=self.progress.step, reason=reason, problem="samples")
            return
        finally:
            measure.reset_peak(self.device)
        self.progress.sampled = self.progress.step
        self.events.emit("samples", step=self.progress.step, **found)

    def _checkpoint(self, leaving: bool = False) -> None:
        start = time.perf_counter()
        self.count_time()
        try:
            # First the log: a checkpoint whose own steps are missing from it would leave a gap after a power cut.
            self.events.sync()
            saved = self.save(self.progress)
        except OSError as error:
            self._not_saved(error, leaving)
            return
        self.last_checkpoint, self.saved_step = saved, self.progress.step
        seconds = round(time.perf_counter() - start, 3)
        self.events.emit("checkpoint", step=self.progress.step, path=str(self.last_checkpoint), seconds=seconds)

    def _not_saved(self, error: OSError, leaving: bool) -> None:
        step, why = self.progress.step, error.strerror or str(error)
        what = f"the checkpoint of step {step} can't be written ({why})"
        if leaving or self.train.on_save_error == "stop":
            saved = f"the last one is {self.last_checkpoint}" if self.last_checkpoint else "there is none yet"
            raise RunFailed(f"step {step}: {what}; {saved}; make room and go on with --resume") from error
        self._unsaved_step = step
        self.events.emit("warning", step=step, reason=f"{what}; the run goes on without it", problem="checkpoint")
