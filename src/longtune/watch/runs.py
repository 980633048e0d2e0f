"""Runs as a watcher finds them: which folders hold one, who is writing it, and its state read step by step.

Only reads. A writer is recognised by the lock that it holds on the run's folder, as the system lists it: taking the
lock to see whether it is free would keep a run from starting in that moment.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from longtune.errors import Problem, UserError
from longtune.watch.alerts import Alert, Surroundings, find_alerts, status_of
from longtune.watch.log import parse, read_events
from longtune.watch.state import RunState
from longtune.watch.tail import Tail

EVENTS = "metrics.jsonl"
DEEPEST = 4
"""Folders below the one that is searched."""
MOST_FOLDERS = 5000
"""Folders that are looked into in one search."""
_LARGEST_FILE = 4 << 20
_PASSED_OVER = ("node_modules", "__pycache__", "checkpoints", "adapter")
_LOCKS = Path("/proc/locks")


def holds_run(folder: Path) -> bool:
    return (folder / EVENTS).is_file()


def find_runs(root: Path) -> list[Path]:
    """The run folders in a folder, itself included, the newest first. Links that lead out of it are not followed."""
    return sorted(_runs_in(root.resolve()), key=_written, reverse=True)


def _runs_in(root: Path) -> Iterator[Path]:
    looked = 0
    waiting = [(root, 0)]
    while waiting and looked < MOST_FOLDERS:
        folder, depth = waiting.pop(0)
        looked += 1
        if holds_run(folder) and stays_inside(folder / EVENTS, root):
            yield folder
            continue
        if depth == DEEPEST:
            continue
        try:
            names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        except OSError:
            continue
        waiting += [
            (folder / name, depth + 1)
            for name in names
            if not name.startswith(".") and name not in _PASSED_OVER and stays_inside(folder / name, root)
        ]


def stays_inside(path: Path, root: Path) -> bool:
    """Whether an entry of a folder below `root` is no link that leads out of it."""
    return not path.is_symlink() or path.resolve().is_relative_to(root)


def _written(folder: Path) -> float:
    try:
        return (folder / EVENTS).stat().st_mtime
    except OSError:
        return 0.0


def choose_runs(named: Sequence[Path]) -> list[Path]:
    """The run folders that a user means: those named, the newest inside a folder of runs, or the newest of all.

    Raises:
        UserError: there is no run.
    """
    if not named:
        root = Path("runs") if Path("runs").is_dir() else Path()
        runs = find_runs(root)
        if not runs:
            place = str(root) if root.name else "this folder"
            raise UserError(Problem(place, "holds no run yet", "start one: longtune train; or name a run's folder"))
        return runs[:1]
    chosen, problems = [], []
    for folder in named:
        # A run that is named may still be loading its model, and hasn't written an event.
        found = [folder.resolve()] if holds_run(folder) or (folder / ".lock").exists() else find_runs(folder)[:1]
        if not found:
            reason = "holds no run" if folder.is_dir() else "there is no such folder"
            problems.append(Problem(str(folder), reason, "name a run's folder (it holds metrics.jsonl)"))
        chosen += [run for run in found if run not in chosen]
    if problems:
        raise UserError(problems)
    return chosen


def short_names(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell the runs apart."""
    names = []
    for run in runs:
        parts = run.absolute().parts
        alike = [other.absolute().parts for other in runs if other != run]
        count = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in alike)), len(parts))
        names.append("/".join(parts[-count:]))
    return names


@dataclass(frozen=True, slots=True)
class Holder:
    """Who writes a run.

    Attributes:
        held: whether a process holds the run's lock; None where the system doesn't list locks.
        pid: that process; None when unknown.
    """

    held: bool | None
    pid: int | None = None


def holder(run: Path) -> Holder:
    """Looks the run's lock up among the locks that the system lists."""
    lock = run / ".lock"
    try:
        found = lock.stat()
        listed = _LOCKS.read_text()
    except FileNotFoundError:
        return Holder(False if _LOCKS.exists() else None)
    except OSError:
        return Holder(None)
    wanted = (os.major(found.st_dev), os.minor(found.st_dev))
    for line in listed.splitlines():
        words = line.split()
        # "1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF"; a waiting one has "->" in front.
        if len(words) < 6 or words[1] != "FLOCK" or words[3] != "WRITE":
            continue
        major, _, rest = words[5].partition(":")
        minor, _, inode = rest.partition(":")
        if inode != str(found.st_ino):
            continue
        pid = int(words[4])
        # On overlays the listed device is that of the layer below.
        if (int(major, 16), int(minor, 16)) == wanted or _has_open(pid, lock):
            return Holder(True, pid if pid > 0 else None)
    return Holder(False)


def _has_open(pid: int, file: Path) -> bool:
    try:
        return any(os.path.realpath(entry.path) == str(file.resolve()) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


class WatchedRun:
    """A run that is looked at again and again.

    Args:
        folder: its folder.
        name: what it is called on the screen; the folder's name by default.

    Attributes:
        state: what its events say.
        surroundings: what the machine says.
        listener: is called with every event that is read.
    """

    def __init__(self, folder: Path, name: str | None = None):
        self.folder = folder
        self.name = as_text(name or folder.name)
        self.state = RunState()
        self.surroundings = Surroundings()
        self.listener: Callable[[dict[str, Any]], None] | None = None
        self._tail = Tail(folder / EVENTS)
        self._files: dict[str, tuple[tuple[int, int], Any]] = {}
        self._checkpoint: tuple[str, int] = ("", 0)

    def refresh(self) -> bool:
        """Reads what is new; says whether anything is."""
        before = self.surroundings
        # Before the events: a run that ends in between has then written its end.
        held = holder(self.folder)
        changed = False

        def restart() -> None:
            self.state = RunState()

        for line in self._tail.lines(restart):
            if event := parse(line):
                self._take(event)
            changed = True
        self._surround(held)
        return changed or (before.held, before.measured) != (self.surroundings.held, self.surroundings.measured)

    def look_around(self) -> None:
        """Asks the machine again, without reading events."""
        self._surround(holder(self.folder))

    def _surround(self, held: Holder) -> None:
        plan = self.json("plan.json")
        self.surroundings = Surroundings(
            now=self.now(),
            held=held.held,
            pid=held.pid,
            free_bytes=self._free_bytes(),
            checkpoint_bytes=self._checkpoint_bytes(),
            predicted=_mapping(plan, "predicted"),
            measured=_mapping(plan, "measured"),
        )

    def _take(self, event: dict[str, Any]) -> None:
        self.state.update(event)
        if self.listener is not None:
            self.listener(event)

    def now(self) -> float:
        return time.time()

    @property
    def status(self) -> str:
        """starting, running, done, failed, stopped, gone (killed), or silent (where nobody can say)."""
        return status_of(self.state, self.surroundings)

    @property
    def alerts(self) -> list[Alert]:
        return find_alerts(self.state, self.surroundings)

    def json(self, name: str) -> Any:
        """A small JSON file of the run, read again when it has changed; None where it is missing or broken."""
        try:
            path = self._own(name)
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if self._files.get(name, (None,))[0] != stamp:
                value = orjson.loads(path.read_bytes()) if found.st_size <= _LARGEST_FILE else None
                self._files[name] = (stamp, value)
        except (OSError, orjson.JSONDecodeError):
            return None
        return self._files[name][1]

    def text(self, name: str) -> str:
        """A small text file of the run; empty where it is missing."""
        try:
            with self._own(name).open("rb") as file:
                return file.read(_LARGEST_FILE).decode(errors="replace")
        except OSError:
            return ""

    def _own(self, name: str) -> Path:
        """A file of the run; raises OSError where it is a link that leads elsewhere."""
        path = (self.folder / name).resolve()
        if path.parent != self.folder.resolve():
            raise FileNotFoundError(name)
        return path

    def _free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None

    def _checkpoint_bytes(self) -> int:
        """Size of the newest checkpoint, looked at once."""
        path = next((str(note.get("path")) for note in reversed(self.state.notes) if note["event"] == "checkpoint"), "")
        if path != self._checkpoint[0]:
            inner = self.folder / "checkpoints" / Path(path).name
            self._checkpoint = (path, _folder_bytes(inner))
        return self._checkpoint[1]

    def facts(self) -> dict[str, Any]:
        """The state as JSON values."""
        state, around = self.state, self.surroundings
        train, meta = state.train, state.meta
        best = state.best_validation
        return {
            "run": self.name,
            "folder": as_text(str(self.folder)),
            "status": self.status,
            "pid": around.pid,
            "method": _told(meta.get("method")),
            "model": _told(meta.get("model")),
            "device": _told(meta.get("device")),
            "dtype": _told(meta.get("dtype")),
            "step": state.step,
            "steps": state.steps,
            **{name: _whole(name, train.last(name)) for name in LATEST},
            "smoothed_loss": state.smoothed_loss,
            "validation": {name: state.validation.last(name) for name in ("loss", "accuracy", "margin")}
            if len(state.validation)
            else None,
            "best_validation": {"step": best[0], "loss": best[1]} if best else None,
            "predicted_peak_bytes": around.predicted_peak,
            "seconds_per_step": state.seconds_per_step,
            "eta_seconds": state.remaining if self.status in ("running", "done") else None,
            "elapsed_seconds": state.elapsed,
            "last_event_t": state.last_t,
            "alerts": [alert.as_dict() for alert in self.alerts],
        }


LATEST = (
    "loss",
    "accuracy",
    "margin",
    "correct",
    "pairs",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "peak_bytes",
    "active_bytes",
)
"""Metrics of the newest step that the state tells."""


class ReplayedRun(WatchedRun):
    """A run played again from its log, as if it were being written.

    Args:
        speed: seconds of the run in one second.
        clock: seconds that go by (for tests).
    """

    def __init__(self, folder: Path, speed: float, name: str | None = None, clock=time.monotonic):
        super().__init__(folder, name)
        self._events = _timed(read_events(folder / EVENTS))
        self._next = 0
        self._speed, self._clock, self._start = speed, clock, clock()

    def now(self) -> float:
        first = self._events[0][0] if self._events else 0.0
        return first + (self._clock() - self._start) * self._speed

    @property
    def finished(self) -> bool:
        return self._next == len(self._events)

    def refresh(self) -> bool:
        before, now = self._next, self.now()
        while self._next < len(self._events) and self._events[self._next][0] <= now:
            self._take(self._events[self._next][1])
            self._next += 1
        plan = self.json("plan.json")
        # The lock says who writes now, not who wrote then.
        self.surroundings = Surroundings(now=now, held=True, predicted=_mapping(plan, "predicted"))
        return self._next > before


def _timed(events: Iterable[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Events with their time; the pauses between a stop and its resume are taken out."""
    timed: list[tuple[float, dict[str, Any]]] = []
    last = shift = 0.0
    for event in events:
        t = event.get("t")
        t = float(t) if isinstance(t, int | float) else last + shift
        if event["event"] == "resumed" and timed:
            shift = t - last
        last = max(last, t - shift)
        timed.append((last, {**event, "t": last}))
    return timed


def _folder_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:
        return 0


def _mapping(values: Any, key: str) -> dict[str, Any]:
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def _whole(name: str, value: float | None) -> float | int | None:
    return int(value) if value is not None and name.endswith("_bytes") else value


def as_text(name: str) -> str:
    """A file's name that can be written anywhere: bytes that are no UTF-8 become question marks."""
    return name.encode("utf-8", "replace").decode()


def _told(value: Any) -> str | None:
    return value if isinstance(value, str) else None
