"""Shared by the tests of watching: run folders as training leaves them, written without training."""

from __future__ import annotations

import fcntl
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

T0 = 1_800_000_000.0
"""When the runs of tests begin, in seconds since the epoch."""


def meta(steps: int = 100, **changes: Any) -> dict[str, Any]:
    return {
        "event": "meta",
        "run": "a",
        "folder": "/runs/a",
        "method": "sft",
        "model": "smollm2",
        "steps": steps,
        "rows": 9,
        "tokens": 1234,
        "trained_tokens": 567,
        "valid_rows": 3,
        "trainable_parameters": 4096,
        "data": ["9 rows of chat"],
        "device": "cpu",
        "dtype": "float32",
        "t": T0,
        **changes,
    }


def train(step: int, loss: float | None = None, seconds: float = 2.0, **changes: Any) -> dict[str, Any]:
    wave = 0.1 * math.sin(step * 1.7)
    return {
        "event": "train",
        "step": step,
        "loss": 0.5 + 2.0 * math.exp(-step / 30) + wave if loss is None else loss,
        "grad_norm": 0.5 + 0.2 * math.cos(step),
        "learning_rate": 2e-4 * (1 - step / 1000),
        "tokens": 2000,
        "trained_tokens": 900,
        "tokens_per_second": 1000.0 + 30 * math.sin(step),
        "seconds": seconds,
        "peak_bytes": 2**30 + step * 2**20,
        "active_bytes": 2**30,
        "t": T0 + step * seconds,
        **changes,
    }


def pair_metrics(step: int) -> dict[str, float]:
    right = min(8.0, 4.0 + step // 20)
    return {"pairs": 8.0, "correct": right, "accuracy": right / 8, "margin": step / 50}


def validation(step: int, loss: float | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "event": "validation",
        "step": step,
        "loss": 0.6 + 2.0 * math.exp(-step / 30) if loss is None else loss,
        "rows": 3,
        "skipped": 0,
        "tokens": 99,
        "trained_tokens": 50,
        "seconds": 1.0,
        "t": T0 + step * 2.0 + 0.5,
        **changes,
    }


def samples(step: int, *answers: str) -> dict[str, Any]:
    items = [{"prompt": f"question {n}", "answer": answer, "reference": "right"} for n, answer in enumerate(answers)]
    return {"event": "samples", "step": step, "items": items, "t": T0 + step * 2.0 + 0.6}


def checkpoint(step: int) -> dict[str, Any]:
    path = f"/runs/a/checkpoints/step-{step:05}"
    return {"event": "checkpoint", "step": step, "path": path, "seconds": 0.1, "t": T0 + step * 2.0 + 0.7}


def done(step: int) -> dict[str, Any]:
    return {
        "event": "done",
        "step": step,
        "adapter": "/runs/a/adapter",
        "loss": 0.5,
        "seconds": step * 2.0,
        "tokens_per_second": 1000.0,
        "peak_bytes": 2**30 + step * 2**20,
        "t": T0 + step * 2.0 + 1.0,
    }


def run_events(steps: int = 100, upto: int | None = None, pairs: bool = False) -> list[dict[str, Any]]:
    """A run's events: validation, samples and a checkpoint every 25 steps; done if it gets that far."""
    upto = steps if upto is None else upto
    events = [meta(steps, method="dpo" if pairs else "sft")]
    for step in range(1, upto + 1):
        own = pair_metrics(step) if pairs else {}
        events.append(train(step, **own))
        if step % 25 == 0:
            events += [validation(step, **own), samples(step, f"answer at {step}", "another"), checkpoint(step)]
    return [*events, done(steps)] if upto == steps else events


def lines(events: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def write_run(folder: Path, events: list[dict[str, Any]] | None = None, **config: Any) -> Path:
    """A run folder with the files that training leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(lines(run_events() if events is None else events))
    settings = {"rank": config.pop("rank", 16), "alpha": 32}
    values = {"model": "smollm2", "data": "rows.jsonl", "method": "sft", "lora": settings, **config}
    (folder / "config.yaml").write_text(json.dumps(values))
    plan = {
        "reason": "set in the config",
        "plan": {"layers_per_segment": 1, "chunk_tokens": 8192},
        "predicted": {
            "peak_bytes": 2**31,
            "seconds_per_step": 1.8,
            "seconds": {"total": 1.8},
            "terms": {"weights": 2**30, "key_value_store": 2**28},
            "device": "cpu",
        },
        "measured": None,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    (folder / ".lock").touch()
    return folder


def long_log(file: Path, count: int, seed: int = 0) -> Path:
    """A log of many steps, written quickly."""
    draw = random.Random(seed)
    with file.open("wb") as out:
        out.write(lines([meta(count)]))
        template = json.dumps(train(1)).replace('"step": 1,', '"step": %d,').split('"loss": ')
        before, after = template[0], template[1].split(",", 1)[1]
        before = before.replace("%", "%%").replace("%%d", "%d")
        for step in range(1, count + 1):
            out.write(f'{before % step}"loss": {0.5 + 3 / (1 + step / 500) + draw.random():.6f},{after}\n'.encode())
    return file


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """This process writes the run."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
