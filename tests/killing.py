"""Kills runs at random moments and resumes them until they are done, then compares with an unbroken run.

    python -m tests.killing --runs 3 --kills 2 --out kills.json

One process imports everything and forks a child for each attempt; the child trains, and the parent sends SIGKILL at a
moment it draws: any time at all, or while a checkpoint is being written. Used by tests/e2e and bench/kills.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from longtune.config import load_config
from longtune.train import train
from longtune.train.run import RunFolder
from longtune.watch import read_events
from tests.tiny_run import adapter_bytes, write_config, write_model, write_pairs, write_rows

METHODS = ("sft", "orpo")
STEPS = 8
SETTINGS = {"steps": STEPS, "batch_size": 2, "accumulate": 2, "eval_every": 3, "save_every": 2, "keep": "last 2"}
"""Dropout, accumulation, packing and shuffling are on; 12 rows are seen almost three times."""
EXTRA = ["samples.prompts=2", "samples.max_new_tokens=4"]
_TIMES = ("t", "seconds", "wall_seconds", "tokens_per_second", "peak_bytes", "active_bytes")


def attempt(config: Path, overrides: list[str], output: Path, kill: Callable[[int], None] | None) -> bool:
    """Trains in a child; whether it was killed before it was done. Raises where it failed by itself."""
    resume = RunFolder(output).path.is_dir()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            train(load_config(config, overrides), resume=resume)
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    if kill is not None:
        kill(child)
    _, status = os.waitpid(child, 0)
    if status not in (0, signal.SIGKILL):
        raise RuntimeError(f"the child left with status {status} (resume: {resume})")
    return bool(status)


def at_any_time(delay: float) -> Callable[[int], None]:
    def kill(child: int) -> None:
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)

    return kill


def while_saving(run: Path, count: int, delay: float) -> Callable[[int], None]:
    """When the `count`-th half-written checkpoint is seen, and `delay` later."""

    def kill(child: int) -> None:
        seen: set[str] = set()
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            seen |= unfinished(run)
            if len(seen) >= count:
                time.sleep(delay)
                break
            time.sleep(0.0002)
        os.kill(child, signal.SIGKILL)

    return kill


def unfinished(run: Path) -> set[str]:
    folder = run / "checkpoints"
    return {name for name in os.listdir(folder) if name.startswith(".step-")} if folder.is_dir() else set()


def compare(run: Path, unbroken: Path) -> list[str]:
    """What differs between a run that was killed and one that was not; nothing may."""
    wrong: list[str] = []
    if adapter_bytes(run) != adapter_bytes(unbroken):
        wrong.append("the adapters differ")
    ours, theirs = read_events(run / "metrics.jsonl"), read_events(unbroken / "metrics.jsonl")
    for kind in ("meta", "train", "validation", "samples", "done"):
        mine, truth = ([_lasting(event) for event in events if event["event"] == kind] for events in (ours, theirs))
        if mine != truth:
            wrong.append(f"{kind}: {[e.get('step') for e in mine]} against {[e.get('step') for e in truth]}, or values")
    if ours[0]["event"] != "meta" or ours[-1]["event"] != "done":
        wrong.append("the log does not begin with meta and end with done")
    for name in ("checkpoints", "adapter"):
        mine, truth = (
            sorted(p.relative_to(base / name).as_posix() for p in (base / name).rglob("*")) for base in (run, unbroken)
        )
        if mine != truth:
            wrong.append(f"{name}: {sorted(set(mine) ^ set(truth))}")
    if left := [path.name for path in run.rglob(".*") if path.name != ".lock"]:
        wrong.append(f"left behind: {left}")
    return wrong


def _lasting(event: dict[str, Any]) -> dict[str, Any]:
    """What of an event must be the same whenever and wherever it is written."""
    if event["event"] in ("meta", "done"):
        names = ("steps", "rows", "tokens", "trained_tokens", "step", "loss", "best", "validation")
        event = {name: event[name] for name in names if name in event}
    return _timeless(event)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in _TIMES}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def state_at_death(run: Path) -> dict[str, Any]:
    """Where a kill hit: the last whole event, whether a line was torn, and what was half written."""
    log = run / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    torn = bool(lines) and not lines[-1].endswith(b"\n")
    whole = [orjson.loads(line) for line in lines if line.endswith(b"\n") and line.startswith(b"{")]
    last = whole[-1] if whole else {}
    return {
        "after": last.get("event"),
        "step": last.get("step"),
        "torn_line": torn,
        "half_written": sorted(unfinished(run)),
    }


def campaign(folder: Path, method: str, runs: int, kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """The runs of one method: each killed `kills` times and resumed until it is done, one record for each."""
    draw = random.Random(f"{method}:{seed}")
    model = write_model(folder / "model")
    data = (write_rows if method == "sft" else write_pairs)(folder / "data", train=12)
    overrides = [f"method={method}", *EXTRA]
    os.environ["LONGTUNE_CACHE"] = str(folder / "cache")

    def config(name: str) -> Path:
        return write_config(folder / f"{name}.yaml", model, data, folder / name, **SETTINGS)

    start = time.monotonic()
    attempt(config("unbroken"), overrides, folder / "unbroken", None)
    seconds = time.monotonic() - start
    saving = max(e["seconds"] for e in read_events(folder / "unbroken" / "metrics.jsonl") if e["event"] == "checkpoint")
    for number in range(runs):
        name = f"run-{number}"
        file, output = config(name), folder / name
        deaths: list[dict[str, Any]] = []
        while not deaths:
            # A run that was done before its first kill proves nothing.
            shutil.rmtree(output, ignore_errors=True)
            for kill in range(kills):
                if (number + kill) % 2:
                    killing = while_saving(output, draw.randint(1, 2), draw.uniform(0, 0.7 * saving))
                else:
                    killing = at_any_time(draw.uniform(0.0, 0.9 * seconds))
                if not attempt(file, overrides, output, killing):
                    break
                deaths.append(state_at_death(output))
            else:
                attempt(file, overrides, output, None)
        yield {"method": method, "run": number, "deaths": deaths, "wrong": compare(output, folder / "unbroken")}


def campaigns(runs: int, kills: int, seed: int) -> list[dict[str, Any]]:
    """The records of all methods."""
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as base:
        for method in METHODS:
            folder = Path(base) / method
            folder.mkdir()
            for record in campaign(folder, method, runs, kills, seed):
                records.append(record)
                print(f"{method} {record['run']}: {record['deaths']} {record['wrong'] or 'equal'}", file=sys.stderr)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each method")
    parser.add_argument("--kills", type=int, default=2, help="kills of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    records = campaigns(asked.runs, asked.kills, asked.seed)
    if asked.out:
        asked.out.write_text(json.dumps(records, indent=1) + "\n")
    print(json.dumps({"runs": len(records), "wrong": [record for record in records if record["wrong"]]}))


if __name__ == "__main__":
    main()
