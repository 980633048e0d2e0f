"""The progress of a run on a terminal: one live line, or plain lines where the output is no terminal."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from longtune.watch.view import View, event_lines, printable

PLAIN_LINES = 100
"""About how many progress lines a whole run prints where they can't be overwritten."""


class ProgressLine:
    """Renders events as they come, as a context manager and a callback.

    Args:
        console: where to write; a live line only if it is a terminal that can move its cursor.
        prefix: stands in front of every line.
    """

    def __init__(self, console: Console | None = None, prefix: str = ""):
        self._console = console or Console(highlight=False)
        self._view = View()
        self._live: Live | None = None
        self._prefix = prefix

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        self._view.update(event)
        for line in event_lines(event):
            # Text and printable: a row's name is no markup and steers no terminal.
            self._console.print(Text(self._prefix + printable(line)), soft_wrap=True)
        if event["event"] != "train":
            return
        if self._live is not None:
            self._live.update(Text(self._view.progress_line(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._due():
            self._console.print(Text(self._prefix + self._view.progress_line()), soft_wrap=True)

    def _due(self) -> bool:
        view = self._view
        return view.step in (1, view.steps) or view.step % max(1, view.steps // PLAIN_LINES) == 0
