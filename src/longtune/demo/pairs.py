"""The demo on pairs: the right ticket against one with a wrong field, trained by a preference method.

Whether the model tells them apart is measured on held-out pairs, before and after, by the average log-prob of each
answer: a figure that needs no reference model and means the same for every method.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtune.config import RunConfig
from longtune.demo.tickets import FIELDS, preference_row, tickets
from longtune.errors import Problem, UserError
from longtune.model.embedded import EMBEDDED
from longtune.model.loading import load_model
from longtune.outputs import write_output

METHODS = ("dpo", "orpo")
PAIRS = 128
"""Pairs of the training data."""
HELD_OUT = 60
"""Pairs that are measured, none of whose names, products, dates and wordings is trained on."""
BATCH = 4
EXAMPLES = 3
LEARNING_RATES = {"dpo": 5e-4, "orpo": 1e-3}


@dataclass(frozen=True, slots=True)
class Measured:
    """The difference of the average log-probs of the right and the wrong answer, pair by pair."""

    margins: list[float]

    @property
    def correct(self) -> int:
        return sum(margin > 0 for margin in self.margins)

    def score(self, fields: Sequence[str]) -> dict[str, Any]:
        """Accuracy, margin, and [correct, pairs] by the field that is wrong."""
        by_field = {field: [m > 0 for m, f in zip(self.margins, fields, strict=True) if f == field] for field in FIELDS}
        return {
            "correct": self.correct,
            "pairs": len(self.margins),
            "accuracy": self.correct / len(self.margins),
            "margin": sum(self.margins) / len(self.margins),
            "by_field": {field: [sum(right), len(right)] for field, right in by_field.items()},
        }


def run(
    method: str,
    folder: Path,
    *,
    seed: int,
    on_event: Callable[[dict[str, Any]], None] | None,
    steps: int | None,
    write: Callable[[str], None],
) -> dict[str, Any]:
    """Train the embedded model to prefer right tickets; parameters are those of `before_after.run`.

    Returns:
        `before` and `after` (see `Measured.score`), `examples`, `adapter`, `seconds`.
    """
    from longtune.train import train

    started = time.monotonic()
    if method not in METHODS:
        raise UserError(Problem(f"demo --method {method}", "there is no such demo", f"use sft, {' or '.join(METHODS)}"))
    held_out = [preference_row(ticket, seed=seed) for ticket in tickets(HELD_OUT, seed=seed, held_out=True)]
    data = _write_rows(folder / "data", held_out, seed)
    fields = [_wrong_field(row) for row in held_out]
    write(f"{EMBEDDED} before training, on {len(held_out)} pairs ...")
    before = _measure(None, data / "test.jsonl")
    write(_line(before.score(fields)))
    trained = train(_config(method, folder, data, seed, steps), on_event)
    if trained.adapter is None:
        return {"folder": str(folder), "stopped": trained.reason, "step": trained.step}
    after = _measure(trained.adapter, data / "test.jsonl")
    result = {
        "method": method,
        "folder": str(folder),
        "before": before.score(fields),
        "after": after.score(fields),
        "examples": _examples(held_out, before, after),
        "adapter": str(trained.adapter),
        "training_seconds": trained.metrics["seconds"],
        "seconds": time.monotonic() - started,
    }
    for line in lines(result):
        write(line)
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """The report of a finished demo for a reader."""
    report = [""]
    for example in result["examples"]:
        report += [
            f"message   {example['message']}",
            f"  right   {example['chosen']}",
            f"  wrong   {example['rejected']}",
            f"  margin  {example['before']:+.3f} before, {example['after']:+.3f} after",
            "",
        ]
    before, after = result["before"], result["after"]
    report += [
        f"{after['pairs']} held-out pairs (other names, products, dates and wordings than in training), "
        "by average log-prob:",
        f"  before  {_line(before)}",
        f"  after   {_line(after)}",
    ]
    for field, (correct, count) in after["by_field"].items():
        report.append(f"  wrong {field:<8} {before['by_field'][field][0]}/{count} -> {correct}/{count}")
    return [
        *report,
        f"done in {result['seconds']:.0f} s, {result['training_seconds']:.0f} s of it training",
        f"adapter   {result['adapter']}",
    ]


def _line(score: dict[str, Any]) -> str:
    return f"right answer preferred {score['correct']}/{score['pairs']}, margin {score['margin']:+.3f}"


def _write_rows(folder: Path, held_out: list[dict[str, Any]], seed: int) -> Path:
    """train.jsonl and test.jsonl (the held-out pairs)."""
    rows = [preference_row(ticket, seed=seed) for ticket in tickets(PAIRS, seed=seed)]
    for name, split in (("train", rows), ("test", held_out)):
        file = folder / f"{name}.jsonl"
        write_output(file, "".join(json.dumps(row) + "\n" for row in split), str(file))
    return folder


def _config(method: str, folder: Path, data: Path, seed: int, steps: int | None) -> RunConfig:
    """An ordinary run: what a user would write for these rows."""
    return RunConfig.model_validate(
        {
            "model": EMBEDDED,
            "data": str(data),
            "output": str(folder),
            "method": method,
            "lora": {"rank": 8, "alpha": 16},
            "memory": {"keep": "everything"},  # The rows are short: nothing need be computed twice.
            "train": {
                "steps": steps or PAIRS // BATCH,
                "learning_rate": LEARNING_RATES[method],
                "warmup_ratio": 0.1,
                "batch_size": BATCH,
                "accumulate": 1,
                "seed": seed,
                "eval_every": 0,
                "save_every": 0,
            },
        }
    )


def _measure(adapter: Path | None, file: Path) -> Measured:
    """The held-out pairs under the embedded model, alone or with an adapter; the model is loaded and let go."""
    from longtune.data import load_dataset
    from longtune.engine import Engine
    from longtune.model.adapters import load_adapter
    from longtune.objective import get
    from longtune.train.evaluate import validate

    loaded = load_model(EMBEDDED)
    model = loaded.model if adapter is None else load_adapter(loaded.model, adapter)
    # Every objective on pairs reports average log-probs; this one needs no reference.
    objective = get("simpo")
    trees = load_dataset(str(file), loaded.tokenizer, method="simpo").trees
    with contextlib.closing(Engine(model)) as engine:
        return Measured([validate(engine, objective, [tree]).metrics["log_prob_margin"] for tree in trees])


def _wrong_field(row: dict[str, Any]) -> str:
    right, wrong = (json.loads(row[side][0]["content"]) for side in ("chosen", "rejected"))
    return next(field for field in FIELDS if right[field] != wrong[field])


def _examples(held_out: list[dict[str, Any]], before: Measured, after: Measured) -> list[dict[str, Any]]:
    """The first pairs, whatever became of them."""
    return [
        {
            "message": row["prompt"][-1]["content"],
            "chosen": row["chosen"][0]["content"],
            "rejected": row["rejected"][0]["content"],
            "before": old,
            "after": new,
        }
        for row, old, new in list(zip(held_out, before.margins, after.margins, strict=True))[:EXAMPLES]
    ]
