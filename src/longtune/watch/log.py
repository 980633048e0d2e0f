"""Reading metrics.jsonl: the events of a run as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

ENDS = ("done", "failed", "stopped")


def parse(line: bytes) -> dict[str, Any] | None:
    """The event that a line holds; None where it holds none (a killed writer left it unfinished)."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log, cleaned by `clean`; a line that holds none is passed over."""
    with path.open("rb") as file:
        return clean(event for event in map(parse, file) if event is not None)


def clean(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Takes out what a resume made void: ends before it, and events of steps that were taken again; and events whose
    step is none (a broken line)."""
    kept: list[dict[str, Any]] = []
    for event in events:
        step = event.get("step", 0)
        if not isinstance(step, int) or step < 0:
            continue
        if event["event"] == "resumed":
            kept = [old for old in kept if old["event"] not in ENDS and old.get("step", 0) <= step]
        kept.append(event)
    return kept
