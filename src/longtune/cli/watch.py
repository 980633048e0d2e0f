"""`longtune watch`: how runs are going, on a terminal or as a local page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, run


def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Run folders; the newest run by default.")
    ] = None,
    replay: Annotated[float | None, typer.Option(metavar="SPEED", help="Play again, so many times as fast.")] = None,
    ascii_: Annotated[bool, typer.Option("--ascii", help="No characters beyond ASCII.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a page instead, of all runs in a folder.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0: any free one.")] = 8787,
    host: Annotated[str, typer.Option(help="Of the page; others than this machine need a token.")] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Show how runs are going. Detaching (q or Ctrl-C) leaves them alone.

    \b
    longtune watch
    longtune watch runs/a runs/b
    longtune watch runs/a --replay 60
    longtune watch --web
    """
    run(lambda: _watch(runs or [], replay, ascii_, web, port, host, as_json), as_json)


def _watch(
    named: list[Path], replay: float | None, ascii_only: bool, web: bool, port: int, host: str, as_json: bool
) -> dict[str, Any]:
    from longtune.errors import Problem, UserError

    if replay is not None and not 0 < replay < float("inf"):
        raise UserError(Problem("--replay", f"{replay:g} is no speed", "a number above 0; 60: a minute in a second"))
    if web and (as_json or replay is not None):
        reason = "goes with neither --json nor --replay"
        raise UserError(Problem("--web", reason, "leave one of them out"))
    if web:
        return _serve(named, host, port)
    if replay is not None and as_json:
        raise UserError(Problem("--json", "tells the state now, and --replay shows the past", "leave one of them out"))

    from longtune.watch.runs import ReplayedRun, WatchedRun, choose_runs, short_names

    folders = choose_runs(named)
    names = short_names(folders)
    if as_json:
        states = []
        for folder, name in zip(folders, names, strict=True):
            watched = WatchedRun(folder, name)
            watched.refresh()
            states.append(watched.facts())
        return states[0] if len(states) == 1 else {"runs": states}

    from rich.console import Console

    from longtune.watch.terminal import watch as show

    watched_runs = [
        WatchedRun(folder, name) if replay is None else ReplayedRun(folder, replay, name)
        for folder, name in zip(folders, names, strict=True)
    ]
    well = show(watched_runs, Console(file=sys.stdout, highlight=False), ascii_only=ascii_only)
    return {"exit_code": 0 if well else 1}


def _serve(named: list[Path], host: str, port: int) -> dict[str, Any]:
    from longtune.watch.web import serve

    serve(named, host=host, port=port)
    return {}
