"""The bar that shows how far the reading of rows has come: on a terminal alone, and on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longtune.data.sources import file_format, resolve
from longtune.errors import UserError

_LINES = (".jsonl", ".csv")


@contextlib.contextmanager
def reading_bar(sources: Any) -> Iterator[Callable[[int], None] | None]:
    """A callback for `load_dataset`'s progress; None where stderr is no terminal.

    The bar goes away when it is done. Of compressed files and parquet the number of rows isn't known beforehand, so
    there it shows rows alone.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeElapsedColumn())
    # Drawn by the callback: a thread that draws might hold a lock while processes are forked.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=count_rows(sources))

        def show(rows: int) -> None:
            bar.update(task, completed=rows, refresh=True)

        yield show


def count_rows(sources: Any) -> int | None:
    """About how many rows the sources have, by their lines; None where that would need reading them."""
    try:
        files = [path for source in resolve(sources) for path in source.files or (Path(source.name),)]
    except UserError:
        return None
    if any(file_format(path) not in _LINES or path.suffix not in _LINES for path in files):
        return None
    return sum(map(_lines, files))


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
