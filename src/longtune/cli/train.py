"""`longtune train`: trains an adapter by a config, or resumes a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Columns, Failed, Overrides, run, stop_code


def train(
    config: Annotated[Path | None, typer.Argument(help="A config file, or a run folder.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Embedded (smollm2), folder, file.gguf or hub name.")] = None,
    data: Annotated[str | None, typer.Option(help="A file, a folder or a hub name.")] = None,
    method: Annotated[str | None, typer.Option(help="sft, dpo, orpo or simpo.")] = None,
    output: Annotated[str | None, typer.Option(help="The run's folder.")] = None,
    columns: Columns = None,
    log: Annotated[list[str] | None, typer.Option(help="More events: memory (after each phase of a step).")] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    stop_after: Annotated[str | None, typer.Option(help="Save and leave after 3h, 90m or 45s.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train an adapter by CONFIG, or by options alone.

    \b
    longtune train --data pairs.jsonl --method dpo --set train.steps=60
    longtune train runs/rows --resume

    Ctrl-C saves a checkpoint after the step in work.
    """
    named = {"model": model, "data": data, "method": method, "output": output}
    overrides = [*(set_ or []), *([f"train.stop_after={stop_after}"] if stop_after else [])]
    overrides += [f"log=[{', '.join(log)}]"] if log else []
    run(lambda: _train(config, named, columns, overrides, resume), as_json)


def _train(
    path: Path | None, named: dict[str, str | None], columns: str | None, overrides: list[str], resume: bool
) -> dict[str, Any]:
    from longtune.cli.options import as_overrides, column_overrides
    from longtune.config import load_config
    from longtune.errors import Problem, UserError

    if path is None and named["data"] is None and not any(item.startswith("data=") for item in overrides):
        raise UserError(Problem("train", "neither a config nor data is named", "longtune train --data rows.jsonl"))
    config = load_config(path, [*as_overrides(named), *column_overrides(columns), *overrides])

    from longtune.train import RunFailed
    from longtune.train import train as train_run
    from longtune.watch import ProgressLine

    # Made here, after --json has turned stdout into stderr.
    console = _lasting_console()
    data = ", ".join(config.sources)
    console.print(f"loading {config.model} and {data}, then planning", soft_wrap=True, markup=False)
    try:
        with ProgressLine(console) as progress:
            done = train_run(config, progress, resume=resume)
    except RunFailed as error:
        raise Failed(str(error)) from error
    if done.adapter is not None:
        console.print(f"talk to it: longtune chat {done.folder}", soft_wrap=True, markup=False)
    return {
        **done.metrics,
        "folder": str(done.folder),
        "adapter": done.adapter and str(done.adapter),
        "reason": done.reason,
        "exit_code": stop_code(done.reason),
    }


def _lasting_console() -> Any:
    """A console on stdout whose reader may go (`| head`, a closed `tee`): a run of hours does not end for that."""
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.file.fileno())
            os.close(null)

    return Lasting(file=sys.stdout, highlight=False)
