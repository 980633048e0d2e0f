"""`longtune report`: a run as one HTML file and a picture, to keep or to send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, run


def report(
    folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run folder; the newest by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="The HTML file; default: report.html in the run's folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's curves, samples and config as one HTML file. A PNG comes beside it.

    \b
    longtune report runs/a
    longtune report runs/a --out a.html

    The page needs no server and no script, and loads nothing from elsewhere.
    """
    run(lambda: _report(folder, out), as_json)


def _report(folder: Path | None, out: Path | None) -> dict[str, Any]:
    from longtune.errors import Problem, UserError
    from longtune.outputs import check_output, write_output, writing
    from longtune.watch.report import page
    from longtune.watch.runs import WatchedRun, choose_runs

    found = choose_runs([folder] if folder else [])[0]
    target = out or found / "report.html"
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(Problem(str(target), "a report is an HTML file", f"--out {target.with_suffix('.html')}"))
    check_output(target, f"--out {target}")
    watched = WatchedRun(found)
    watched.refresh()
    picture = target.with_suffix(".png")
    write_output(target, page(watched), f"--out {target}")
    with writing(str(picture)):
        written = _draw(watched, picture)
    print(target)
    if written:
        print(picture)
    else:
        print("no PNG: matplotlib is missing (pip install 'longtune[report]')")
    return {"run": str(found), "html": str(target), "png": str(picture) if written else None}


def _draw(watched: Any, picture: Path) -> bool:
    from longtune.watch.picture import draw

    try:
        draw(watched, picture)
    except ImportError:
        return False
    return True
