"""TensorBoard: event files in the run's folder, under tensorboard/."""

from __future__ import annotations

import json
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from longtune.train.events import Event
from longtune.train.trackers import TrackedRun, sample_text, scalars


def start(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run)


class TensorBoard:
    """Writes at once what it is given, so that a kill loses nothing that metrics.jsonl has."""

    def __init__(self, run: TrackedRun):
        self.keeps: dict[str, Any] = {}
        self.has: dict[str, int] | None = {}
        self._run = run
        self._writer: SummaryWriter | None = None

    def __call__(self, event: Event) -> None:
        if self._writer is None:
            # TensorBoard forgets what it has of this step and later ones: a resumed run takes them again.
            purge = event["step"] + 1 if event["event"] == "resumed" else None
            self._writer = SummaryWriter(str(self._run.folder / "tensorboard"), purge_step=purge)
            if event["event"] == "meta":
                text = json.dumps(self._run.config, indent=2, ensure_ascii=False)
                self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"], walltime=event["t"])
        if event["event"] == "samples":
            for number, item in enumerate(event["items"]):
                self._writer.add_text(f"samples/{number}", sample_text(item), event["step"], walltime=event["t"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
