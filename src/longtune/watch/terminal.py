"""Watching on a terminal: a full screen with keys, or plain lines where the output is no terminal.

What is drawn is `screen`'s. Detaching leaves the run as it is; a watcher gives way to the run it watches.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from longtune.watch.charts import charts_for
from longtune.watch.progress import ProgressLine
from longtune.watch.runs import ReplayedRun, WatchedRun
from longtune.watch.screen import SMOOTHINGS, Options, safe_lines, screen
from longtune.watch.view import printable

INTERVAL = 1.0
"""Seconds between looks at the files."""
REDRAW = 5.0
"""Seconds after which the screen is drawn again though nothing has happened: pauses grow."""
SHARE = 0.0007
"""Of all the machine's cores: what a watcher's pictures may take, so that ten of them stay below a hundredth with all
else that they do. A key is answered at once whatever it costs."""
SLOWEST = 10.0
"""Seconds between two pictures of a run that writes, at most."""
OVER = ("done", "failed", "stopped", "gone")


def watch(runs: Sequence[WatchedRun], console: Console, *, ascii_only: bool = False) -> bool:
    """Shows runs until the user detaches; without a screen, until they are over.

    Returns:
        False if a run was followed to an end that is no good one (failed, gone).
    """
    if console.is_terminal and not console.is_dumb_terminal:
        _watch_screen(runs, console, ascii_only or not speaks_unicode(console))
        return True
    follow(runs, console)
    return not any(run.status in ("failed", "gone") for run in runs)


def speaks_unicode(console: Console) -> bool:
    """Whether braille can be shown: not in another encoding, and not on the console of Linux itself."""
    return console.encoding.lower().startswith("utf") and os.environ.get("TERM") != "linux"


def _watch_screen(runs: Sequence[WatchedRun], console: Console, ascii_only: bool) -> None:
    _give_way()
    options = Options(ascii_only=ascii_only, mono=console.no_color or console.color_system is None)
    replayed = any(isinstance(run, ReplayedRun) for run in runs)
    live = Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), Keys() as keys, live:
        for run in runs:
            run.refresh()
        while True:
            size, began = console.size, time.process_time()
            live.update(Group(*screen(runs, options, size.width, size.height)), refresh=True)
            drawn, changed = time.monotonic(), False
            rest = INTERVAL if replayed else resting(time.process_time() - began)
            while True:
                # There is nothing to look for while no new picture may be drawn.
                key = keys.wait(max(INTERVAL, rest - (time.monotonic() - drawn)))
                if key is not None and not press(key, options, runs):
                    return
                changed |= any([run.refresh() for run in runs])
                passed = time.monotonic() - drawn
                if key is not None or console.size != size or passed >= (rest if changed else max(rest, REDRAW)):
                    break


def resting(spent: float) -> float:
    """Seconds until the next picture, after one that took `spent` seconds of a processor."""
    return min(max(INTERVAL, spent / (SHARE * (os.cpu_count() or 1))), SLOWEST)


def press(key: str, options: Options, runs: Sequence[WatchedRun]) -> bool:
    """Does what a key asks for; False to detach."""
    if key in ("q", "Q", "\x03", "\x04"):
        return False
    if key in ("m", "M"):
        count = len(charts_for(any(run.state.has_pairs for run in runs)))
        options.chart = (options.chart + (1 if key == "m" else -1)) % count
    elif key == "s":
        later = [weight for weight in SMOOTHINGS if weight > options.smoothing]
        options.smoothing = later[0] if later else SMOOTHINGS[0]
    elif key == "l":
        options.log = not options.log
    elif key == "c":
        options.compare = not options.compare
    elif key == "n":
        options.compare = False
        options.selected = (options.selected + 1) % len(runs)
    return True


def follow(
    runs: Sequence[WatchedRun],
    console: Console,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints the runs' events as lines until all of them are over."""
    told: dict[int, set[str]] = {}
    for run in runs:
        prefix = f"{printable(run.name)}: " if len(runs) > 1 else ""
        run.listener = _tolerant(ProgressLine(console, prefix))
    while True:
        for index, run in enumerate(runs):
            run.refresh()
            alerts = {alert.kind: alert.text for alert in run.alerts}
            for kind in alerts.keys() - told.get(index, set()):
                console.print(Text(f"{printable(run.name)}: {printable(alerts[kind])}"), soft_wrap=True)
            told[index] = set(alerts)
        if all(_over(run) for run in runs):
            return
        sleep(INTERVAL)


def _over(run: WatchedRun) -> bool:
    return run.finished if isinstance(run, ReplayedRun) else run.status in OVER


def _tolerant(show: ProgressLine) -> Callable[[dict], None]:
    """Passes over a broken or foreign event."""

    def listener(event: dict) -> None:
        if event["event"] in ("train", "meta", "resumed") or safe_lines(event):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                show(event)

    return listener


def _give_way() -> None:
    """Lets the run go first wherever it and its watchers want the same core."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10)


class Keys:
    """Single key presses, as a context manager; without a terminal to read from there are none."""

    def __init__(self):
        self._file = sys.stdin
        self._before = None
        self._resized: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        try:
            if self._file is None or not self._file.isatty():
                return self
            import termios
            import tty
        except (ImportError, ValueError):
            return self
        self._before = termios.tcgetattr(self._file)
        tty.setcbreak(self._file.fileno())
        # A signal alone would not end the wait for a key; a byte in a pipe does.
        self._resized = os.pipe()
        for end in self._resized:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._resized[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGWINCH, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None or self._resized is None:
            return
        import termios

        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for end in self._resized:
            os.close(end)

    def wait(self, seconds: float) -> str | None:
        """The next key, empty after a change of the terminal's size; None after some time without either.

        The keys of an escape sequence are one.
        """
        if self._resized is None:
            time.sleep(seconds)
            return None
        ready, _, _ = select.select([self._file, self._resized[0]], [], [], seconds)
        if not ready:
            return None
        if self._resized[0] in ready:
            os.read(self._resized[0], 512)
            if self._file not in ready:
                return ""
        try:
            pressed = os.read(self._file.fileno(), 32).decode(errors="replace")
        except OSError:
            pressed = ""
        # Nothing to read, or an error, means that the terminal is gone.
        return "q" if not pressed else pressed[0]
