"""The run folder: what lies where, who may write there, and what a resumed run is compared with."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtune.config import RunConfig, load_config, shown
from longtune.errors import Problem, UserError
from longtune.train.events import last_kind
from longtune.train.files import read_json

_MARKS = ("config.yaml", "metrics.jsonl", "checkpoints", "adapter")

FREE_ON_RESUME = (
    "output",
    "log",
    "samples",
    "track",
    "train.on_save_error",
    "train.stop_after",
    "train.save_every",
    "train.eval_every",
    "train.eval_rows",
    "train.keep",
    "train.on_nonfinite",
)
"""Keys that a resumed run may change: none of them changes a loss or the adapter."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.json"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    def holds_run(self) -> bool:
        # A log without a line is left by a run that ended before it began.
        found = (self.path / name for name in _MARKS if (self.path / name).exists())
        return any(mark != self.events or mark.stat().st_size for mark in found)

    def is_described(self) -> bool:
        """Whether the files that describe the run are there."""
        return all(file.exists() for file in (self.config, self.environment, self.plan))

    def check_new(self) -> None:
        """Raises UserError where a new run can't go."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(Problem(str(self.path), "is a file, and a run needs a folder", "choose another output"))
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            fix = "choose another output"
            raise UserError(Problem(str(self.path), f"can't be made: {parent} is no folder to write in", fix))
        if self.holds_run():
            fix = "go on with it: --resume; or choose another output"
            raise UserError(Problem(str(self.path), "this folder already holds a run", fix))

    def check_resumable(self, config: RunConfig) -> list[str]:
        """What differs in the config, in words, of what may; both configs with their paths made absolute.

        Raises:
            UserError: there is nothing to resume, or another run than `config` describes.
        """
        if not self.path.is_dir():
            raise UserError(Problem(str(self.path), "there is no run to resume", "start it without --resume"))
        if last_kind(self.events) == "done":
            fix = "to train further, start a new run with init_adapter"
            raise UserError(Problem(str(self.path), "this run is done", fix))
        if not self.config.exists():
            return []
        before, now = _flat(load_config(self.config).anchored().to_dict()), _flat(config.anchored().to_dict())
        differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
        each = {key: (shown(before.get(key)), shown(now.get(key))) for key in differing}
        problems = [
            Problem(f"{self.config}: {key}", f"the run was started with {then}, not {here}")
            for key, (then, here) in each.items()
            if not _is_free(key)
        ]
        if problems:
            *others, last = problems
            fix = "resume with the run's own config, or start a new run with init_adapter"
            raise UserError([*others, Problem(last.place, last.reason, fix)])
        return [f"{key}: {then} at the start, {here} now" for key, (then, here) in each.items()]

    def compare(self, facts: dict[str, Any]) -> list[str]:
        """What differs between the run's environment.json and `facts`, in words, of what may.

        Versions and devices may, and then the last bits of the numbers do.

        Raises:
            UserError: the data or the base model is not what the run was started with.
        """
        if not self.environment.exists():
            return []
        before = _flat(_mapping(self.environment, "resume without that comparison"))
        now = _flat(facts)
        fixed = {"data.train": "train data", "data.valid": "valid data", "model": "base model"}
        problems = [
            Problem(name, "is not what this run was started with", "put the old one back, or start a new run")
            for key, name in fixed.items()
            if key in before and before[key] != now[key]
        ]
        if problems:
            raise UserError(problems)
        told = [key for key in now if key in ("python", "device", "device_name", "threads") or "packages." in key]
        return [
            f"{key}: {before[key]} at the start, {now[key]} now"
            for key in told
            if before.get(key, now[key]) != now[key]
        ]

    def stored_plan(self) -> dict[str, Any] | None:
        """What plan.json holds; None where the run didn't get that far.

        Raises:
            UserError: it is damaged.
        """
        if not self.plan.exists():
            return None
        return _mapping(self.plan, "have the run planned anew (other chunks have other dropout)", ("plan", "reason"))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second writer out while the block runs; the system lifts the lock of a killed process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"can't be made: {error.strerror or error}"
            raise UserError(Problem(str(self.path), reason, "choose another output")) from None
        try:
            file = (self.path / ".lock").open("a")
        except OSError as error:
            reason = f"can't be written: {error.strerror or error}"
            raise UserError(Problem(str(self.path), reason, "make it writable, or choose another output")) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(Problem(str(self.path), "another process is writing this run", "wait for it")) from None
            except OSError as error:
                reason = f"can't be locked against a second writer: {error.strerror or error}"
                fix = "choose an output on a file system that has locks"
                raise UserError(Problem(str(self.path), reason, fix)) from None
            yield


def _mapping(path: Path, without: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object of the run that has `keys`; raises UserError where it is damaged."""
    try:
        values = read_json(path)
        lacking = ["no object"] if not isinstance(values, dict) else [f"no {key}" for key in keys if key not in values]
        if not lacking:
            return values
        why = lacking[0]
    except ValueError as error:
        why = str(error)
    raise UserError(Problem(str(path), f"is damaged ({why})", f"put it back from a copy, or remove it to {without}"))


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
