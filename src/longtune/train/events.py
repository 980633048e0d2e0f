"""The events of a run: one line each in metrics.jsonl, and the same dict for every listener.

Kinds: `meta` (first), `resumed`, `reference` (log-probs of a frozen model, as far as they are there), `train`,
`validation`, `samples`, `checkpoint`, `warning`, `memory` (with `log: [memory]`), `replanned` (another plan after the
device ran out of memory), and at the end `done`, `failed` or `stopped` (a checkpoint was saved
on request and the run can be resumed). docs/runs.md has every field. Reading them is the work of `longtune.watch`. The
file is only ever appended to: a run that resumes at step s writes `resumed` with that step, and takes the later ones
again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


class LogNotWritten(OSError):
    """metrics.jsonl can't be written; what was to be written waits in memory."""


@dataclass(slots=True)
class _Listener:
    name: str
    call: OnEvent
    once: bool
    failed: bool = False


class EventLog:
    """Appends events to a file and hands them to listeners.

    Args:
        path: metrics.jsonl. A line that a killed writer left unfinished is closed, so that the next one is whole.
        callbacks: called with each event after it is written, as `listen` does.
        on_error: what a line that can't be written does: `stop` raises LogNotWritten; `continue` keeps it in memory
            and writes it, in its order, as soon as there is room.

    Attributes:
        is_new: the file held no whole event before.
        last_step: highest step of the file's `train` events before; 0 without any.
    """

    def __init__(self, path: Path, callbacks: Sequence[OnEvent] = (), on_error: Literal["stop", "continue"] = "stop"):
        self._on_error = on_error
        self._listeners: list[_Listener] = []
        for callback in callbacks:
            self.listen(callback)
        self._waiting: list[bytes] = []
        self._told = False
        # Unbuffered: a line that fails half-way is taken back, and nothing of it waits in a buffer.
        self._file = path.open("ab", buffering=0)
        events, self.last_step, self._measured, torn = _survey(path)
        self.is_new = not events
        if torn:
            self._waiting.append(b"\n")

    def listen(self, call: OnEvent, name: str = "on_event", once: bool = False) -> None:
        """Adds a listener. An exception in it becomes one `warning`, and the run goes on.

        Args:
            name: who it is in that warning.
            once: it gets no more events after its first exception.
        """
        self._listeners.append(_Listener(name, call, once))

    def emit(self, kind: str, **fields: Any) -> Event:
        """Writes one event. `t` is seconds since the epoch; numbers that are not finite become null in the file.

        A validation or samples that a resumed run takes again, and that its log has, is left out: it was the same.

        Raises:
            LogNotWritten: under `on_error: stop`, after the listeners have got the event.
        """
        event: Event = {"event": kind, **fields, "t": round(time.time(), 3)}
        if kind == "resumed":
            self._measured = {(old, step) for old, step in self._measured if step <= event["step"]}
        if (kind, event.get("step")) in self._measured:
            return event
        self._waiting.append(orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        problem: LogNotWritten | None = None
        try:
            self._write()
        except LogNotWritten as error:
            problem = error
        self._tell(event)
        if problem is None:
            self._told = False
        elif self._on_error == "stop":
            raise problem
        elif not self._told:
            self._told = True
            reason = f"{problem}: events wait in memory until it can"
            self.emit("warning", step=event.get("step", 0), reason=reason, problem="log")
        return event

    def sync(self) -> None:
        """Makes sure that everything emitted so far survives a power cut; raises LogNotWritten where it can't."""
        self._write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _not_written(error) from error

    def close(self) -> None:
        """Writes what still waits, if there is room now, and closes the file."""
        with contextlib.suppress(LogNotWritten):
            self._write()
        self._file.close()

    def _write(self) -> None:
        handle = self._file.fileno()
        while self._waiting:
            line = self._waiting[0]
            start = os.fstat(handle).st_size
            try:
                while line:
                    line = line[os.write(handle, line) :]
            except OSError as error:
                # On a full disk taking a half line back needs no room. Where it fails, too, readers pass over it.
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, start)
                raise _not_written(error) from error
            del self._waiting[0]

    def _tell(self, event: Event) -> None:
        failed: list[tuple[_Listener, Exception]] = []
        for listener in self._listeners:
            if listener.failed and listener.once:
                continue
            try:
                # Its own: what it does to the event is nobody else's business.
                listener.call(dict(event))
            except Exception as error:
                if not listener.failed:
                    listener.failed = True
                    failed.append((listener, error))
        for listener, error in failed:
            if not listener.once:
                # The caller's own code: its traceback is worth more than a line. The terminal may be gone.
                with contextlib.suppress(OSError, ValueError):
                    traceback.print_exception(error, file=sys.stderr)
            what = " ".join(f"{type(error).__name__}: {error}".split())
            rest = "it gets no more events" if listener.once else "the run goes on, and its next ones are not told"
            reason = f"{listener.name} failed at the event {event['event']} ({what}); {rest}"
            self.emit("warning", step=event.get("step", 0), reason=reason, problem="listener")


def last_kind(path: Path) -> str | None:
    """Kind of the last event in a log, warnings left out (a listener may fail at the end); None without one, or where
    its line is torn."""
    if not path.exists():
        return None
    for line in reversed(path.read_bytes().splitlines()):
        event = _event(line)
        if event is None or event["event"] != "warning":
            return None if event is None else event["event"]
    return None


def _event(line: bytes) -> Event | None:
    """The event that a line holds; None where it holds none."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _survey(path: Path) -> tuple[int, int, set[tuple[str, int]], bool]:
    """Of a file: its whole events, the highest step of a `train` event, (kind, step) of every validation and samples,
    and whether its last line is unfinished."""
    events = last = 0
    measured: set[tuple[str, int]] = set()
    line = b"\n"
    with path.open("rb") as file:
        for line in file:
            event = _event(line)
            if event is None:
                continue
            events += 1
            kind, step = event["event"], event.get("step")
            if kind == "train" and isinstance(step, int):
                last = max(last, step)
            elif kind in ("validation", "samples") and isinstance(step, int):
                measured.add((kind, step))
    return events, last, measured, not line.endswith(b"\n")


def _not_written(error: OSError) -> LogNotWritten:
    return LogNotWritten(f"metrics.jsonl can't be written ({error.strerror or error})")
