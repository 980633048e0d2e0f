"""trackio: a local project (`trackio show`), or the Space that TRACKIO_SPACE_ID names.

Without that variable trackio keeps everything on this disk, in the Hugging Face cache or TRACKIO_DIR, and asks no
network.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import trackio

from longtune.train.events import Event
from longtune.train.trackers import PROJECT, TrackedRun, scalars


def start(run: TrackedRun) -> Trackio:
    return Trackio(run)


class Trackio:
    """One run of a trackio project, found again by its name."""

    def __init__(self, run: TrackedRun):
        # A name belongs to one run of a project; folders in several places may share theirs.
        name = run.saved["name"] if run.resumed else f"{run.name}-{secrets.token_hex(3)}"
        self.keeps: dict[str, Any] = {"name": name}
        self.has: dict[str, int] | None = None
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=name,
            config=run.flat_config(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def __call__(self, event: Event) -> None:
        values: dict[str, Any] = dict(scalars(event))
        if event["event"] == "samples":
            values = {
                f"samples/{number}/{part}": item[part]
                for number, item in enumerate(event["items"])
                for part in ("prompt", "answer")
            }
        if values:
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        # Not the run's own method, after which trackio would end it once more when Python leaves.
        trackio.finish()
