"""Reading metrics.jsonl: the events of a run as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

_ENDS = ("done", "failed", "stopped")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log, cleaned by `clean`; a line that a killed writer left unfinished is passed over."""
    events = []
    for line in path.read_bytes().splitlines():
        try:
            events.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return clean(events)


def clean(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Takes out what a resume made void: ends before it, and events of steps that were taken again."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "resumed":
            kept = [old for old in kept if old["event"] not in _ENDS and old.get("step", 0) <= event["step"]]
        kept.append(event)
    return kept
