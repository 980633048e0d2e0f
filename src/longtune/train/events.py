"""The events of a run: one line each in metrics.jsonl, and the same dict for every callback.

Kinds: `meta` (first), `resumed`, `reference` (log-probs of a frozen model, as far as they are there), `train`,
`validation`, `checkpoint`, `warning`, and at the end `done`, `failed` or `stopped` (a checkpoint was saved on request
and the run can be resumed). Reading them is the work of `longtune.watch`. The file is only ever appended to: a run
that resumes at step s writes `resumed` with that step, and takes the later ones again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


class EventLog:
    """Appends events to a file and hands them to callbacks.

    Args:
        path: metrics.jsonl. A line that a killed writer left unfinished is closed, so that the next one is whole.
        callbacks: called with each event after it is written.

    Attributes:
        is_new: nothing had been written before.
    """

    def __init__(self, path: Path, callbacks: Sequence[OnEvent] = ()):
        self._callbacks = tuple(callbacks)
        self._file = path.open("ab")
        self.is_new = not self._file.tell()
        if not self.is_new and not _ends_with_newline(path):
            self._file.write(b"\n")

    def emit(self, kind: str, **fields: Any) -> Event:
        """Writes one event. `t` is seconds since the epoch; numbers that are not finite become null in the file."""
        event: Event = {"event": kind, **fields, "t": round(time.time(), 3)}
        self._file.write(orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        self._file.flush()
        for callback in self._callbacks:
            callback(event)
        return event

    def sync(self) -> None:
        """Makes sure that everything written so far survives a power cut."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def last_kind(path: Path) -> str | None:
    """Kind of the last event in a log; None without one, or where its line is torn."""
    if not path.exists():
        return None
    lines = path.read_bytes().splitlines()
    try:
        return orjson.loads(lines[-1])["event"] if lines else None
    except orjson.JSONDecodeError:
        return None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
