"""What watching costs the run that is watched: step times with ten watchers attached, and without.

    python bench/watch_cost.py --out watch.json

One `longtune train` of the embedded model; ten `longtune watch` of it, each on a terminal of its own of 120 x 40. The
watchers are stopped (SIGSTOP) and let go (SIGCONT) by turns of a few steps, so both kinds of steps share whatever else
the machine does. Beside the ratio of the step times stands the watchers' own processor time, which is no noise.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import chain
from pathlib import Path

from common import machine

from longtune.watch import read_events

LONGTUNE = [sys.executable, "-m", "longtune.cli"]
SIZE = {"COLUMNS": "120", "LINES": "40", "TERM": "xterm-256color"}


def write_config(folder: Path, steps: int, rows: int) -> Path:
    draw = random.Random(0)
    words = ["river", "stone", "seven", "green", "lamp", "walks", "under", "paper", "cold", "bread"]
    with (folder / "rows.jsonl").open("w") as out:
        for _ in range(64):
            out.write(json.dumps({"text": " ".join(draw.choices(words, k=96))}) + "\n")
    settings = {"steps": steps, "batch_size": rows, "accumulate": 1, "save_every": 0, "eval_every": 0}
    config = {"model": "smollm2", "data": str(folder / "rows.jsonl"), "output": str(folder / "run"), "train": settings}
    file = folder / "run.yaml"
    file.write_text(json.dumps(config))
    return file


def steps_of(run: Path) -> list[dict]:
    log = run / "metrics.jsonl"
    return [event for event in read_events(log) if event["event"] == "train"] if log.exists() else []


def attach(run: Path, count: int) -> list[subprocess.Popen]:
    """Watchers whose screens are read and thrown away, as a terminal would draw them."""
    watchers = []
    for _ in range(count):
        main, side = pty.openpty()
        command = [*LONGTUNE, "watch", str(run)]
        watchers.append(subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env={**os.environ, **SIZE}))
        os.close(side)
        threading.Thread(target=drain, args=(main,), daemon=True).start()
    return watchers


def drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:
        # The watcher has left.
        return


def processor_seconds(process: subprocess.Popen) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_step(run: Path, step: int, trainer: subprocess.Popen) -> int:
    """Waits until a step is written; returns the newest."""
    while trainer.poll() is None:
        done = len(steps_of(run))
        if done >= step:
            return done
        time.sleep(0.2)
    raise RuntimeError("the run has ended too early")


def compare(run: Path, trainer: subprocess.Popen, watchers: list[subprocess.Popen], asked: argparse.Namespace) -> dict:
    """Turns of steps with and without watchers; the first step of each turn belongs to neither."""
    turns: dict[str, list[list[float]]] = {"with": [], "without": []}
    spent = elapsed = 0.0
    for turn in range(2 * asked.turns):
        # Which kind comes first alternates too: with, without, without, with, ...
        kind = ("with", "without", "without", "with")[turn % 4]
        for watcher in watchers:
            watcher.send_signal(signal.SIGCONT if kind == "with" else signal.SIGSTOP)
        before, start = [processor_seconds(watcher) for watcher in watchers], time.monotonic()
        first = len(steps_of(run))
        last = wait_for_step(run, first + 1 + asked.steps, trainer)
        if kind == "with":
            spent += sum(map(processor_seconds, watchers)) - sum(before)
            elapsed += time.monotonic() - start
        turns[kind].append([event["seconds"] for event in steps_of(run)[first + 1 : last]])
        print(kind, [round(seconds, 3) for seconds in turns[kind][-1]], flush=True)
    medians = {kind: statistics.median(chain(*found)) for kind, found in turns.items()}
    draw = random.Random(0)
    ratios = sorted(resampled(turns, draw) for _ in range(2000))
    return {
        "watchers": len(watchers),
        "steps": {kind: sum(map(len, found)) for kind, found in turns.items()},
        "median_seconds": medians,
        "ratio": medians["with"] / medians["without"],
        "ratio_95": [ratios[50], ratios[-51]],
        "processor_share": spent / elapsed,
        "processor_seconds_per_watcher_and_step": spent / len(watchers) / sum(map(len, turns["with"])),
        "seconds": turns,
    }


def resampled(turns: dict[str, list[list[float]]], draw: random.Random) -> float:
    """The ratio of medians for turns drawn with replacement (bootstrap)."""
    medians = {}
    for kind, found in turns.items():
        medians[kind] = statistics.median(chain(*draw.choices(found, k=len(found))))
    return medians["with"] / medians["without"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watchers", type=int, default=10)
    parser.add_argument("--turns", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=5, help="in each turn")
    parser.add_argument("--rows", type=int, default=2, help="in each step, of about 100 tokens")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config, run = write_config(folder, 100_000, asked.rows), folder / "run"
        with (folder / "output").open("w") as output:
            trainer = subprocess.Popen([*LONGTUNE, "train", str(config)], stdout=output, stderr=output)
            watchers: list[subprocess.Popen] = []
            try:
                wait_for_step(run, 3, trainer)
                watchers = attach(run, asked.watchers)
                # Starting them costs more than watching; that is over after a few steps.
                time.sleep(10)
                found = compare(run, trainer, watchers, asked)
            finally:
                for process in (*watchers, trainer):
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
                for process in (*watchers, trainer):
                    process.wait()
    result = {"machine": machine(), "load": os.getloadavg(), **found}
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
