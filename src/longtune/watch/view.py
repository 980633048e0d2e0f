"""What a run's events say, in words: a pure function of the events, for every renderer.

A `View` is fed events in the order of metrics.jsonl. It knows no terminal and no files.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from longtune.errors import counted

RECENT = 20
"""Steps whose times the remaining time is judged by."""


@dataclass(slots=True)
class View:
    """State of a run, as far as its events tell."""

    steps: int = 0
    step: int = 0
    train: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def update(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "meta":
            self.steps = event["steps"]
        elif kind == "resumed":
            self.steps, self.step = event["steps"], event["step"]
        elif kind == "train":
            self.step, self.train = event["step"], event
            self.seconds.append(event["seconds"])
        elif kind == "validation":
            self.validation = event

    @property
    def remaining(self) -> float | None:
        """Seconds to the last step, judged by recent steps; None before the first."""
        if not self.seconds:
            return None
        return (self.steps - self.step) * sum(self.seconds) / len(self.seconds)

    def progress_line(self) -> str:
        """One line: step, loss, learning rate, gradient norm, speed, remaining time; about 70 characters."""
        if not self.train:
            return f"step {self.step}/{self.steps}"
        train = self.train
        return (
            f"step {self.step}/{self.steps}  loss {number(train['loss'])}  {pairs(train)}"
            f"lr {train['learning_rate']:.1e}  norm {number(train['grad_norm'], 3)}  "
            f"{train['tokens_per_second']:,.0f} tok/s  ETA {duration(self.remaining)}"
        )


def event_lines(event: dict[str, Any]) -> list[str]:
    """What a reader should see of an event besides the progress line."""
    kind = event["event"]
    if kind == "meta":
        seen = f"{counted(float(event['epochs']), 'epoch')}: " if "epochs" in event else ""
        rows, tokens = (event.get(f"seen_{name}", event[name]) for name in ("rows", "tokens"))
        return [
            f"{event['method']} on {event['model']}, {event['device']}, {event['dtype']}",
            *event["data"],
            (
                f"{counted(event['steps'], 'step')}, {seen}{counted(rows, 'row')}, {counted(tokens, 'token')}; "
                f"{counted(event['valid_rows'], 'row')} of validation"
            ),
            f"{event['trainable_parameters']:,} trainable parameters; run folder {event['folder']}",
        ]
    if kind == "resumed":
        changed = [f"changed since: {what}" for what in event.get("changed", ())]
        start = f"resumed from {event['checkpoint']}" if event["checkpoint"] else "no checkpoint yet: starting again"
        return [start, *changed]
    if kind == "reference":
        how = f"{event['computed']:,} computed in {duration(event['seconds'])}, kept in {event['path']}"
        if not event["computed"]:
            how = f"all from {event['path']}"
        return [f"reference log-probs: {event['done']:,} of {counted(event['rows'], 'row')} of {event['split']}, {how}"]
    if kind == "validation":
        return [
            (
                f"step {event['step']}  validation loss {number(event['loss'])}  {pairs(event)}"
                f"({counted(event['rows'], 'row')}, {counted(event['trained_tokens'], 'trained token')}, "
                f"{duration(event['seconds'])})"
            )
        ]
    if kind == "samples":
        count = len(event["items"])
        return [f"step {event['step']}  answered {count} sample prompt{'s' if count != 1 else ''}"]
    if kind == "checkpoint":
        return [f"step {event['step']}  saved {event['path']}"]
    if kind == "warning":
        rows = event.get("rows")
        return [f"warning: {event['reason']}" + (f" (rows {', '.join(rows[:4])})" if rows else "")]
    if kind == "done":
        speed = f", {event['tokens_per_second']:,.0f} tok/s" if event["tokens_per_second"] else ""
        steps = counted(event["step"], "step")
        planned = event.get("predicted")
        predicted = f" (predicted {size(planned['peak_bytes'])})" if planned else ""
        return [
            f"done: {steps} in {duration(event['seconds'])}{speed}, peak {size(event['peak_bytes'])}{predicted}",
            f"adapter: {event['adapter']}",
        ]
    if kind == "replanned":
        return [f"step {event['step']}: {event['reason']}; once more by another plan ({event['plan_reason']})"]
    if kind == "stopped":
        return [f"stopped after step {event['step']} ({event['reason']}); go on with --resume"]
    if kind == "failed":
        return [f"failed at step {event['step']}: {event['reason']}"]
    return []


def pairs(metrics: dict[str, Any]) -> str:
    """Accuracy as correct/total and margin of a method on pairs, with two spaces after; empty for others."""
    if "pairs" not in metrics:
        return ""
    # Before the first update a pair is neither right nor wrong under DPO: policy and reference are one model.
    ties = f" ({metrics['ties']:.0f} tied)" if metrics.get("ties") else ""
    return f"acc {metrics['correct']:.0f}/{metrics['pairs']:.0f}{ties}  margin {number(metrics['margin'], 3)}  "


def number(value: float | None, digits: int = 5) -> str:
    """A metric in few characters; a value that was not finite is `nan`."""
    return "nan" if value is None else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """m:ss or h:mm:ss; `?` when unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: int) -> str:
    """Bytes in GiB or MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def pace(seconds: float | None) -> str:
    """A time that may be short: 0.31 s, 12.4 s, 3:05."""
    return duration(seconds) if seconds is None or seconds >= 60 else f"{seconds:.3g} s"


def printable(text: object) -> str:
    """One line of text in which nothing steers a terminal: control characters become visible."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else f"\\x{ord(c):02x}" for c in str(text))
