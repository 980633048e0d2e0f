"""The demo run: rows are made, the embedded model is asked, trained like any user's run, and asked again.

Training goes through `longtune.train` with an ordinary config and data files, all of which stay in the run's folder.
What is measured afterwards uses the saved adapter, loaded onto a fresh model.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtune.config import RunConfig
from longtune.demo import pairs
from longtune.demo.ordinary import CHECK, answers_right, ordinary_rows
from longtune.demo.tickets import INSTRUCTION, Ticket, chat_row, is_right, is_ticket, parse, tickets
from longtune.model.embedded import EMBEDDED
from longtune.model.generation import Messages, generate
from longtune.model.loading import load_model
from longtune.outputs import check_output, write_output

TICKETS = 256
"""Tickets of the training data."""
ORDINARY = 32
"""Ordinary questions of the training data."""
HELD_OUT = 40
"""Tickets that are measured, none of whose names, products, dates and wordings is trained on."""
BATCH = 4
EXAMPLES = 3

_LONGEST_TICKET = 72
_LONGEST_ANSWER = 40


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model answered: to the held-out tickets, and to `CHECK`."""

    tickets: list[str]
    questions: list[str]


def run(
    method: str = "sft",
    output: str | Path | None = None,
    seed: int = 0,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    steps: int | None = None,
    write: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train the embedded model to write tickets, and say what changed on rows that it never saw.

    Args:
        method: sft; or dpo or orpo, whose demo is in `pairs`.
        output: the run's folder; runs/demo by default.
        seed: seed of the rows, the adapter and the order of training.
        on_event: gets the events of the training run.
        steps: optimiser steps; by default one pass over the rows.
        write: gets the report, line by line.

    Returns:
        `before` and `after` ({exact, valid_json, ordinary_right, ordinary_tickets}, all shares of 1), `examples` and
        `ordinary` (texts before and after), `held_out`, `adapter`, `chat` (a command), `seconds`.

    Raises:
        UserError: the package with the model is missing, or the folder holds a run already.
    """
    from longtune.train import train
    from longtune.train.folder import RunFolder

    started = time.monotonic()
    folder = Path(output or "runs/demo")
    RunFolder(folder).check_new()
    check_output(folder, str(folder), folder=True)
    if method != "sft":
        return pairs.run(method, folder, seed=seed, on_event=on_event, steps=steps, write=write)
    held_out = tickets(HELD_OUT, seed=seed, held_out=True)

    write(f"{EMBEDDED} before training, on {len(held_out)} tickets and {len(CHECK)} ordinary questions ...")
    before = _ask(None, held_out)
    write(_score_line(_score(before, held_out)))

    config = _config(folder, _write_rows(folder / "data", seed), seed, steps)
    trained = train(config, on_event)
    if trained.adapter is None:
        return {"folder": str(folder), "stopped": trained.reason, "step": trained.step}

    after = _ask(trained.adapter, held_out)
    result = {
        "method": method,
        "folder": str(folder),
        "held_out": len(held_out),
        "before": _score(before, held_out),
        "after": _score(after, held_out),
        "examples": _examples(held_out, before, after),
        "ordinary": _questions(before, after),
        "adapter": str(trained.adapter),
        "chat": shlex.join(["longtune", "chat", str(folder), "--system", INSTRUCTION]),
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
            f"  before  {_short(example['before'])}",
            f"  after   {_short(example['after'])}  ({'right' if example['right'] else 'wrong'})",
            "",
        ]
    for question in result["ordinary"][:EXAMPLES]:
        report += [
            f"question  {question['question']}",
            f"  before  {_short(question['before'])}",
            f"  after   {_short(question['after'])}",
            "",
        ]
    report += [
        f"{result['held_out']} held-out tickets (other names, products, dates and wordings than in training), "
        f"{len(result['ordinary'])} ordinary questions:",
        f"  before  {_score_line(result['before'])}",
        f"  after   {_score_line(result['after'])}",
        f"done in {result['seconds']:.0f} s, {result['training_seconds']:.0f} s of it training",
        f"adapter   {result['adapter']}",
        f"chat      {result['chat']}",
    ]
    return report


def _ask(adapter: Path | None, held_out: Sequence[Ticket]) -> Asked:
    """The answers of the embedded model, alone or with an adapter; the model is loaded and let go."""
    from longtune.model.adapters import load_adapter

    loaded = load_model(EMBEDDED)
    model = loaded.model if adapter is None else load_adapter(loaded.model, adapter)

    def answers(prompts: Sequence[Messages], longest: int) -> list[str]:
        return generate(model, loaded.tokenizer, prompts, max_new_tokens=longest, batch_size=HELD_OUT)

    return Asked(
        answers([ticket.prompt for ticket in held_out], _LONGEST_TICKET),
        answers([[{"role": "user", "content": check.question}] for check in CHECK], _LONGEST_ANSWER),
    )


def _write_rows(folder: Path, seed: int) -> Path:
    """train.jsonl (tickets and ordinary rows, shuffled) and test.jsonl (the held-out tickets)."""
    rows = [chat_row(ticket) for ticket in tickets(TICKETS, seed=seed)]
    for question, answer in ordinary_rows(ORDINARY, seed=seed):
        turns = (("user", question), ("assistant", answer))
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    random.Random(f"demo:{seed}").shuffle(rows)
    held_out = [chat_row(ticket) for ticket in tickets(HELD_OUT, seed=seed, held_out=True)]
    for name, split in (("train", rows), ("test", held_out)):
        file = folder / f"{name}.jsonl"
        write_output(file, "".join(json.dumps(row) + "\n" for row in split), str(file))
    return folder


def _config(folder: Path, data: Path, seed: int, steps: int | None) -> RunConfig:
    """An ordinary run: what a user would write for these rows."""
    return RunConfig.model_validate(
        {
            "model": EMBEDDED,
            "data": str(data),
            "output": str(folder),
            "lora": {"rank": 8, "alpha": 16},
            "memory": {"keep": "everything"},  # The rows are short: nothing need be computed twice.
            "train": {
                "steps": steps or (TICKETS + ORDINARY) // BATCH,
                "learning_rate": 1e-3,
                "warmup_ratio": 0.1,
                "batch_size": BATCH,
                "accumulate": 1,
                "seed": seed,
                "eval_every": 0,
                "save_every": 0,
            },
        }
    )


def _score(asked: Asked, held_out: Sequence[Ticket]) -> dict[str, float]:
    exact = sum(is_right(answer, ticket) for answer, ticket in zip(asked.tickets, held_out, strict=True))
    right = sum(answers_right(check, answer) for check, answer in zip(CHECK, asked.questions, strict=True))
    return {
        "exact": exact / len(held_out),
        "valid_json": sum(parse(answer) is not None for answer in asked.tickets) / len(held_out),
        "ordinary_right": right / len(CHECK),
        "ordinary_tickets": sum(is_ticket(answer) for answer in asked.questions) / len(CHECK),
    }


def _score_line(score: dict[str, float]) -> str:
    return (
        f"tickets exactly right {score['exact']:.0%}, valid JSON {score['valid_json']:.0%}; "
        f"ordinary questions right {score['ordinary_right']:.0%}, taken for tickets {score['ordinary_tickets']:.0%}"
    )


def _examples(held_out: Sequence[Ticket], before: Asked, after: Asked) -> list[dict[str, Any]]:
    """The first tickets, whatever became of them."""
    return [
        {
            "message": ticket.message,
            "expected": ticket.answer,
            "before": old,
            "after": new,
            "right": is_right(new, ticket),
        }
        for ticket, old, new in list(zip(held_out, before.tickets, after.tickets, strict=True))[:EXAMPLES]
    ]


def _questions(before: Asked, after: Asked) -> list[dict[str, Any]]:
    return [
        {"question": check.question, "before": old, "after": new, "right": answers_right(check, new)}
        for check, old, new in zip(CHECK, before.questions, after.questions, strict=True)
    ]


def _short(text: str, most: int = 200) -> str:
    """One line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
