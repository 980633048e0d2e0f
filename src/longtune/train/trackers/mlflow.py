"""MLflow: through its client, with no global run.

The server is the one that MLFLOW_TRACKING_URI names; without it, files in the run's folder, under mlflow/, and no
network. The experiment is MLFLOW_EXPERIMENT_NAME's.
"""

from __future__ import annotations

import os
import time
from typing import Any

# What the user has set wins. A server that has gone holds up one step for seconds, not for many minutes.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from longtune.train.events import Event
from longtune.train.trackers import PROJECT, TrackedRun, sample_text, scalars

_LONGEST_VALUE = 500
_STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


def start(run: TrackedRun) -> MLflow:
    return MLflow(run)


class MLflow:
    """One MLflow run, found again by its id."""

    def __init__(self, run: TrackedRun):
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder.absolute() / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if run.resumed:
            self._id = run.saved["run"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            settings = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in run.flat_config().items()]
            self._client.log_batch(self._id, params=settings)
        self.keeps: dict[str, Any] = {"run": self._id}
        self.has: dict[str, int] | None = {kind: self._last_step(f"{kind}/loss") for kind in ("train", "validation")}
        self._ended = False

    def __call__(self, event: Event) -> None:
        values = scalars(event)
        if values:
            at = int(event["t"] * 1000)
            self._client.log_batch(self._id, [Metric(key, value, at, event["step"]) for key, value in values.items()])
        if event["event"] == "samples":
            text = "\n\n---\n\n".join(sample_text(item) for item in event["items"])
            self._client.log_text(self._id, text, f"samples/step-{event['step']:05d}.md")
        if status := _STATUS.get(event["event"]):
            self._client.set_terminated(self._id, status, int(time.time() * 1000))
            self._ended = True

    def _last_step(self, key: str) -> int:
        return max((entry.step for entry in self._client.get_metric_history(self._id, key)), default=-1)

    def close(self) -> None:
        """A run that went without a word of its end is killed, to MLflow."""
        if not self._ended:
            self._client.set_terminated(self._id, "KILLED")
