"""What every verb shares: errors without a traceback, exit codes, and `--json`.

Exit codes: 0 done, 1 the run failed, 2 the user must change something, 3 it does not fit the memory; 128 + n when
signal n stopped a run after it was saved.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from longtune.errors import UserError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config; repeatable.")
]

Columns = Annotated[str | None, typer.Option("--map", help="Rename columns: theirs=ours,theirs=ours.")]


class Failed(Exception):
    """A verb's own end with a message and exit code 1."""


def run(work: Callable[[], dict[str, Any]], as_json: bool) -> None:
    """Runs a verb and leaves with its exit code.

    Args:
        work: does the verb's work and printing; returns the object for `--json`. Its `exit_code`, if any, is
            the command's.
        as_json: everything that `work` prints goes to stderr, and the object is the only line on stdout.
    """
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result, code = _guarded(work)
    if as_json:
        import orjson

        # Numbers that are not finite become null: JSON has none.
        sys.stdout.write(orjson.dumps({"exit_code": code, **result}, default=str).decode() + "\n")
        sys.stdout.flush()
    if code:
        raise typer.Exit(code)


@contextlib.contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str | None], None]]:
    """Gives a function that shows on a terminal what is being done (None: no more), on stderr.

    Args:
        quiet: show nothing.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console

    status = Console(stderr=True).status("")

    def say(what: str | None) -> None:
        if what is None:
            status.stop()
        else:
            status.update(what)
            status.start()

    try:
        yield say
    finally:
        status.stop()


def stop_code(reason: str | None) -> int:
    """Exit code of a run that stopped early for a reason: 128 + n after signal n, else 0 (it was asked for)."""
    return next((128 + number for number in signal.Signals if number.name == reason), 0)


def _guarded(work: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], int]:
    try:
        result = work()
        return result, result.pop("exit_code", 0)
    except UserError as error:
        for problem in error.problems:
            fix = f"\n  fix: {problem.fix}" if problem.fix else ""
            print(f"error: {problem.place}: {problem.reason}{fix}", file=sys.stderr)
        problems = [{"place": p.place, "reason": p.reason, "fix": p.fix} for p in error.problems]
        return {"error": str(error), "problems": problems}, error.exit_code
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return {"error": str(error)}, 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return {"error": "interrupted"}, 130
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}, 1
