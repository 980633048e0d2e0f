"""Trackers: TensorBoard, trackio, wandb and MLflow as readers of a run's events.

A tracker is a listener like any other: it sees what metrics.jsonl holds, has no way to the model, and a failure of it
is one `warning` event, never the end of a run. What a resumed run needs to go on in the same tracked run lies in
trackers.json. One small file for each; the library is imported there, when the tracker starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from longtune.config import RunConfig
from longtune.errors import Problem, UserError
from longtune.train import files
from longtune.train.events import Event, EventLog

PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb", "mlflow": "mlflow"}
"""The module that must be there for each tracker; also the name of longtune's extra."""
PROJECT = "longtune"
"""Project (MLflow: experiment) where the library's own variable names none."""
_NOT_MEASURED = ("step", "t")
_REPEATED = ("train", "validation", "samples")
"""Events that a resumed run writes again, with the same values."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is started with.

    Attributes:
        folder: the run's folder.
        config: the run's keys, as config.yaml has them.
        resumed: the run was tracked before.
        saved: what this tracker kept when it started first.
    """

    folder: Path
    config: dict[str, Any]
    resumed: bool
    saved: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    def flat_config(self) -> dict[str, Any]:
        """The config with dotted keys."""
        return dict(_flatten(self.config, ""))


class Tracker(Protocol):
    """One tracker of one run.

    Attributes:
        keeps: JSON values that a resumed run's tracker gets as `TrackedRun.saved`.
        has: highest step of each kind of event that it has of the run before, and need not get again; None where it
            can't tell.
    """

    keeps: dict[str, Any]
    has: dict[str, int] | None

    def __call__(self, event: Event) -> None: ...
    def close(self) -> None: ...


def check_installed(names: Sequence[str]) -> None:
    """Raises UserError that names every tracker whose package is missing."""
    problems = [
        Problem(f"track: {name}", f"the package {PACKAGES[name]} is not installed", f"pip install 'longtune[{name}]'")
        for name in names
        if importlib.util.find_spec(PACKAGES[name]) is None
    ]
    if problems:
        raise UserError(problems)


class Tracking:
    """The trackers of a run, from its start to its end.

    Args:
        resumed: the run's log holds events already.

    Attributes:
        problems: of a resumed run, a line about each tracker that could not be started.

    Raises:
        UserError: a tracker of a new run can't be started.
    """

    def __init__(self, folder: Path, config: RunConfig, events: EventLog, resumed: bool):
        self._trackers: list[Tracker] = []
        self.problems: list[str] = []
        file = folder / "trackers.json"
        saved: dict[str, Any] = {}
        if file.exists():
            try:
                saved = files.read_json(file)
            except ValueError:
                self.problems.append(f"{file} is damaged: trackers begin anew, with the steps from here on")
        for name in config.track:
            home = importlib.import_module(f"longtune.train.trackers.{name}")
            known = saved.get(name) or {}
            try:
                run = TrackedRun(folder, config.to_dict(), resumed and name in saved, known)
                tracker: Tracker = home.start(run)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                if not resumed:
                    self.close()
                    fix = "put it right, or leave it out of track"
                    raise UserError(Problem(f"track: {name}", f"can't be started ({reason})", fix)) from error
                self.problems.append(f"tracker {name} can't be started and gets nothing of this run ({reason})")
                continue
            self._trackers.append(tracker)
            saved[name] = tracker.keeps
            # By itself all that the log has, but for its last step, which a kill may have kept from the tracker.
            last = events.last_step - 1 if run.resumed else -1
            has = tracker.has if tracker.has is not None else {kind: last for kind in _REPEATED}
            events.listen(_after(has, tracker), f"tracker {name}", once=True)
        if config.track:
            files.write_json(file, saved)

    def close(self) -> None:
        """Ends them all. The log has had its last line by now, so what goes wrong is said on stderr."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                tracker.close()
            except Exception as error:
                print(f"{type(tracker).__name__} could not be ended: {type(error).__name__}: {error}", file=sys.stderr)


def _after(has: dict[str, int], tracker: Tracker) -> Callable[[Event], None]:
    """The tracker, without the events of steps that it has got already."""

    def tell(event: Event) -> None:
        if event["event"] not in _REPEATED or event["step"] > has.get(event["event"], -1):
            tracker(event)

    return tell


def scalars(event: Event) -> dict[str, float]:
    """Every finite number of a `train` or `validation` event as `train/loss`, `validation/loss`, ...; else none."""
    kind = event["event"]
    if kind not in ("train", "validation"):
        return {}
    return {
        f"{kind}/{name}": float(value)
        for name, value in event.items()
        if name not in _NOT_MEASURED and isinstance(value, int | float) and math.isfinite(value)
    }


def sample_text(item: dict[str, Any]) -> str:
    """One sample as Markdown; the texts are set as code, whatever they hold."""
    parts = [("prompt", item["prompt"]), ("answer", item["answer"]), ("reference", item.get("reference"))]
    return "\n\n".join(f"**{name}**\n\n{_as_code(text)}" for name, text in parts if text is not None)


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "


def _flatten(value: Any, prefix: str) -> Any:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flatten(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner
