"""Weights & Biases: online where the user is logged in, else offline files in the run's folder (`wandb sync`).

Its own variables hold: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL. Console output, git state and code are
not sent.
"""

from __future__ import annotations

import netrc
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from longtune.train.events import Event
from longtune.train.trackers import PROJECT, TrackedRun, scalars


def start(run: TrackedRun) -> WeightsAndBiases:
    return WeightsAndBiases(run)


class WeightsAndBiases:
    """One wandb run, found again by its id."""

    def __init__(self, run: TrackedRun):
        number = run.saved["id"] if run.resumed else secrets.token_hex(4)
        self.keeps: dict[str, Any] = {"id": number}
        self.has: dict[str, int] | None = None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=number,
            name=run.name,
            dir=str(run.folder.absolute()),
            config=run.config,
            resume="allow",
            # wandb would ask for a key on the terminal, and hold up a run that nobody watches.
            mode=None if "WANDB_MODE" in os.environ or _logged_in() else "offline",
            # Several runs of one process must not end each other.
            reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, disable_code=True, x_disable_stats=True
            ),
        )
        self._failed = False

    def __call__(self, event: Event) -> None:
        values: dict[str, Any] = dict(scalars(event))
        if event["event"] == "samples":
            rows: list[Any] = [[item["prompt"], item["answer"], item.get("reference", "")] for item in event["items"]]
            values["samples"] = wandb.Table(columns=["prompt", "answer", "reference"], data=rows)
        if values:
            self._run.log(values, step=event["step"])
        self._failed = event["event"] == "failed"

    def close(self) -> None:
        self._run.finish(exit_code=int(self._failed))


def _logged_in() -> bool:
    """A key is there: in the environment, or where `wandb login` writes it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return host is not None and netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
