"""`longtune demo`: trains the embedded model on a task that it makes up, and shows what changed."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, run, stop_code


def demo(
    method: Annotated[str, typer.Option(help="sft, dpo or orpo.")] = "sft",
    output: Annotated[str, typer.Option(help="The run's folder.")] = "runs/demo",
    as_json: AsJson = False,
) -> None:
    """Train a small model on made-up rows, in minutes, offline.

    Shows answers before and after, and what the adapter gets right on rows it never saw; dpo and orpo train on
    pairs, and show which of two answers is preferred.
    """
    run(lambda: _demo(method, output), as_json)


def _demo(method: str, output: str) -> dict[str, Any]:
    from rich.console import Console

    from longtune import demo as room
    from longtune.watch import ProgressLine

    with ProgressLine(Console(file=sys.stdout, highlight=False)) as progress:
        result = room.run(method=method, output=output, on_event=progress)
    return {**result, "exit_code": stop_code(result.get("stopped"))}
