"""Connections of the page's server that take too long to send a request: they are dropped, and their place is free.

uvicorn alone waits without end for a request that was begun (or never is), and counts it among its connections. How
long an answer takes, and how long an answered connection may idle, is left to it.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0
"""Time for a whole request, its body included, however its bytes trickle in."""


class Impatient(H11Protocol):
    """uvicorn's h11 protocol with a limit on the time in which a request must arrive."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Whether a request is still wanted; the time began with the first look that said so."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(SECONDS, self._drop)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _drop(self) -> None:
        self._waiting = None
        if not self.transport.is_closing():
            self.transport.close()
