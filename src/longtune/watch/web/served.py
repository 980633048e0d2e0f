"""What the page is told: the runs and configs of one folder, read from their files.

Names that come from outside are looked up in a listing of what is there, and never become paths.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from longtune.watch.log import parse
from longtune.watch.runs import (
    DEEPEST,
    EVENTS,
    MOST_FOLDERS,
    WatchedRun,
    as_text,
    find_runs,
    holds_run,
    stays_inside,
)
from longtune.watch.screen import safe_lines

LISTED = 5.0
"""Seconds for which a listing of the folder is believed."""
FRESH = 0.5
"""Seconds for which a run's state is believed."""
OPEN_RUNS = 12
"""Runs whose whole series are kept in memory; another one takes the place of the one not asked for longest."""
MOST_CONFIGS = 500
MOST_POINTS = 4000
_GLANCE = 64 << 10
_LARGEST_CONFIG = 256 << 10
_HIDDEN_METRICS = {"step", "t"}


class Unknown(KeyError):
    """There is no run or config of that name."""


class Served:
    """The runs below a folder, or some runs alone. Safe to ask from several threads.

    Args:
        root: the folder; nothing outside it is ever read.
        only: run folders in it, where no others and no configs are to be shown.
    """

    def __init__(self, root: Path, only: Sequence[Path] = ()):
        self.root = root.resolve()
        self.only = tuple(run.resolve() for run in only)
        self._lock = threading.RLock()
        self._listing: tuple[float, dict[str, Path]] = (0.0, {})
        self._configs: tuple[float, dict[str, Path]] = (0.0, {})
        self._open: OrderedDict[str, tuple[float, WatchedRun]] = OrderedDict()
        self._glances: dict[str, tuple[tuple[int, int], WatchedRun]] = {}

    @property
    def may_start(self) -> bool:
        """Whether runs can be started: a whole folder is served."""
        return not self.only

    def runs(self) -> dict[str, Path]:
        """Run folders by name (their path below the root), the newest first."""
        with self._lock:
            when, found = self._listing
            if time.monotonic() - when > LISTED or not when:
                folders = sorted(self.only, key=_written, reverse=True) if self.only else find_runs(self.root)
                found = {self._name(folder): folder for folder in folders}
                self._listing = (time.monotonic(), found)
            return found

    def configs(self) -> dict[str, Path]:
        """Config files by name (their path below the root)."""
        if not self.may_start:
            return {}
        with self._lock:
            when, found = self._configs
            if time.monotonic() - when > LISTED or not when:
                found = {self._name(file): file for file in _config_files(self.root)}
                self._configs = (time.monotonic(), found)
            return found

    def forget_listing(self) -> None:
        """The next question looks at the folder again."""
        with self._lock:
            self._listing, self._configs = (0.0, {}), (0.0, {})

    def _name(self, path: Path) -> str:
        return as_text(path.relative_to(self.root).as_posix() if path != self.root else path.name)

    def run(self, name: str) -> WatchedRun:
        """A run's state, read on to the end of its events.

        Raises:
            Unknown: no run of that name is listed.
        """
        with self._lock:
            folder = self.runs().get(name)
            if folder is None:
                raise Unknown(name)
            when, watched = self._open.pop(name, (0.0, None))
            watched = watched or WatchedRun(folder, name)
            if time.monotonic() - when > FRESH or not when:
                watched.refresh()
                when = time.monotonic()
            self._open[name] = (when, watched)
            while len(self._open) > OPEN_RUNS:
                self._open.popitem(last=False)
            return watched

    def overview(self) -> list[dict[str, Any]]:
        """Every run in a few figures, from the first line and the last ones of its events."""
        with self._lock:
            listed = self.runs()
            for name in self._glances.keys() - listed.keys():
                del self._glances[name]
            return [entry for name, folder in listed.items() if (entry := self._glance(name, folder)) is not None]

    def _glance(self, name: str, folder: Path) -> dict[str, Any] | None:
        try:
            found = (folder / EVENTS).stat()
            stamp = (found.st_size, found.st_mtime_ns)
            before, watched = self._glances.get(name, (None, None))
            if watched is None or before != stamp:
                watched = _glanced(folder, name)
                self._glances[name] = (stamp, watched)
        except OSError:
            # Gone in between, or not ours to read.
            return None
        watched.look_around()
        told = watched.facts()
        kept = ("run", "status", "method", "model", "step", "steps", "smoothed_loss", "validation", "alerts")
        return {key: told[key] for key in kept} | {"written": found.st_mtime, "eta_seconds": told["eta_seconds"]}

    def page(self, name: str) -> dict[str, Any]:
        """Everything about one run but its series and samples."""
        with self._lock:
            run = self.run(name)
            lines = [
                {"event": note["event"], "step": note.get("step"), "t": note.get("t"), "lines": safe_lines(note)}
                for note in run.state.notes
            ]
            return {
                **run.facts(),
                "meta": {key: run.state.meta.get(key) for key in ("data", "plan_reason", "started", "rows", "tokens")},
                "events": [line for line in lines if line["lines"]],
                "plan": run.json("plan.json"),
                "environment": run.json("environment.json"),
                "config": run.text("config.yaml"),
                "samples": len(run.state.samples),
            }

    def series(self, name: str, points: int, first: float | None = None, last: float | None = None) -> dict[str, Any]:
        """All metrics of a run in buckets, see `longtune.watch.series.Buckets`."""
        points = min(max(points, 2), MOST_POINTS)
        with self._lock:
            state = self.run(name).state
            return {
                kind: {
                    metric: table.buckets(metric, points, first, last).rounded()
                    for metric in table.names
                    if metric not in _HIDDEN_METRICS
                }
                for kind, table in (("train", state.train), ("validation", state.validation))
            }

    def samples(self, name: str) -> list[dict[str, Any]]:
        """Sample answers by evaluation: [{step, items: [{prompt, answer, reference}]}], all strings."""
        with self._lock:
            return [
                {"step": event.get("step", 0), "items": [item for item in map(_sample, _items(event)) if item]}
                for event in self.run(name).state.samples
            ]

    def difference(self, names: Sequence[str]) -> dict[str, Any]:
        """Keys of the runs' configs that differ, each with one value a run; and how many are the same."""
        flats = [flat(read_yaml(self.run(name).text("config.yaml"))) for name in names]
        keys = sorted(set().union(*flats))
        rows = [{"key": key, "values": [values.get(key) for values in flats]} for key in keys]
        differing = [row for row in rows if len(set(row["values"])) > 1]
        return {"runs": list(names), "rows": differing, "same": len(rows) - len(differing)}

    def described_configs(self) -> list[dict[str, Any]]:
        """Config files with what they say of themselves."""
        described = []
        for name, file in self.configs().items():
            values = read_yaml(_text(file))
            if not isinstance(values, dict) or "data" not in values:
                continue
            keys = ("model", "method", "output")
            told = {key: as_text(values[key]) for key in keys if isinstance(values.get(key), str)}
            described.append({"config": name, **told})
        return described


def _glanced(folder: Path, name: str) -> WatchedRun:
    """A run whose state holds only its first event and its last ones."""
    run = WatchedRun(folder, name)
    with (folder / EVENTS).open("rb") as file:
        head = file.readline(_GLANCE)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(len(head), size - _GLANCE))
        cut = file.tell() > len(head)
        lines = file.read().splitlines()
    # The first line of the rest is half of one, the last one may still be in writing.
    for line in [head, *lines[1 if cut else 0 :]]:
        if event := parse(line):
            run.state.update(event)
    return run


def _config_files(root: Path) -> list[Path]:
    found: list[Path] = []
    waiting, looked = [(root, 0)], 0
    while waiting and looked < MOST_FOLDERS and len(found) < MOST_CONFIGS:
        folder, depth = waiting.pop(0)
        looked += 1
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        # A run's own config names the folder that already holds the run.
        if holds_run(folder):
            continue
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith(".") or not stays_inside(path, root):
                continue
            if entry.is_file() and path.suffix in (".yaml", ".yml") and entry.stat().st_size <= _LARGEST_CONFIG:
                found.append(path)
            elif entry.is_dir() and depth < DEEPEST and entry.name not in ("node_modules", "__pycache__"):
                waiting.append((path, depth + 1))
    return found[:MOST_CONFIGS]


class _PlainLoader(yaml.SafeLoader):
    """Without aliases: a few lines of them stand for more values than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read here")
        return super().compose_node(parent, index)


def read_yaml(text: str) -> Any:
    """The values of a YAML text; None where it can't be read."""
    try:
        # A subclass of SafeLoader: nothing is executed.
        return yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Leaves of nested mappings as `a.b` and text; lists are leaves."""
    if isinstance(values, dict) and values:
        found: dict[str, str] = {}
        for key, value in values.items():
            found |= flat(value, f"{prefix}.{_leaf(key)}" if prefix else _leaf(key))
        return found
    return {prefix: "null" if values is None else _leaf(values)} if prefix else {}


def _leaf(value: Any) -> str:
    try:
        return as_text(str(value))
    except ValueError:
        return "a number too long to print"


def _items(event: dict[str, Any]) -> list[Any]:
    items = event.get("items")
    return items if isinstance(items, list) else []


def _sample(item: Any) -> dict[str, str] | None:
    if not isinstance(item, dict):
        return None
    kept = {key: item[key] for key in ("prompt", "answer", "reference") if item.get(key) is not None}
    return {key: value if isinstance(value, str) else _messages(value) for key, value in kept.items()}


def _messages(value: Any) -> str:
    """A prompt of messages as text, other values as they print."""
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        return "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in value)
    return str(value)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _written(folder: Path) -> float:
    try:
        return (folder / EVENTS).stat().st_mtime
    except OSError:
        return 0.0
