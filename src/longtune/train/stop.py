"""Why a run should leave after the step in work: a signal, a cancelled token, or its time limit."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopper:
    """Watches for reasons to stop, as a context manager.

    The first SIGINT, SIGTERM or SIGHUP (the terminal has gone) is remembered; the second has its ordinary effect at
    once. Handlers are set only in the main thread (Python allows no other) and put back at the end. A SIGHUP that is
    ignored, as under nohup, stays so.

    Args:
        cancel: stops the run when set, from any thread.
        stop_after: seconds from now.
    """

    def __init__(self, cancel: threading.Event | None = None, stop_after: float | None = None):
        self._cancel = cancel
        self._deadline = time.monotonic() + stop_after if stop_after is not None else None
        self._signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        for caught in self._before:
            signal.signal(caught, signal.default_int_handler if caught is signal.SIGINT else signal.SIG_DFL)

    @property
    def reason(self) -> str | None:
        """SIGINT, SIGTERM, SIGHUP, cancelled, stop_after, or None: go on."""
        if self._signal is not None:
            return self._signal.name
        if self._cancel is not None and self._cancel.is_set():
            return "cancelled"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "stop_after"
        return None
