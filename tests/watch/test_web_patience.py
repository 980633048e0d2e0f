"""Connections that don't send their request in time lose their place; all others keep it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("uvicorn", reason="needs the extra web")

import uvicorn

from longtune.watch.web import patience

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LIMIT = 20


async def slow(scope, receive, send):
    """Answers a request, piece by piece, when its body has come."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.disconnect":
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    for piece in (b"a", b"b", b"c", b"d"):
        await send({"type": "http.response.body", "body": piece, "more_body": piece != b"d"})
        if scope["path"] == "/slow":
            await asyncio.sleep(0.3)


@pytest.fixture
def connect(monkeypatch):
    """Opens a connection to a server that waits 0.8 seconds for a request."""
    monkeypatch.setattr(patience, "SECONDS", 0.8)
    config = uvicorn.Config(slow, http=patience.Impatient, ws="none", lifespan="off", limit_concurrency=LIMIT)
    config.log_level = "critical"
    config.configure_logging()
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with contextlib.ExitStack() as opened:

        def connect(sent=b""):
            connection = opened.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
            connection.sendall(sent)
            return connection

        yield connect
    server.should_exit = True
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


def answer(connection):
    """All that comes until the answer is whole or the connection ends."""
    got = b""
    while not got.endswith(b"\r\n\r\nabcd") and (piece := connection.recv(4096)):
        got += piece
    return got


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_half_open_connections_lose_their_places(connect, begun):
    half_open = [connect(begun) for _ in range(LIMIT - 1)]
    time.sleep(0.1)
    assert b" 503 " in answer(connect(GET)), "the last place, which uvicorn keeps free, is all that was left"
    for connection in half_open:
        assert connection.recv(1) == b""
    assert answer(connect(GET)).startswith(b"HTTP/1.1 200")


def test_bytes_that_trickle_in_buy_no_time(connect):
    connection = connect()
    start = time.monotonic()
    with contextlib.suppress(OSError):
        for byte in GET[:-3] + b"a" * 60:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    assert time.monotonic() - start < 3.0


def test_a_second_request_on_a_connection_has_its_own_time(connect):
    connection = connect(GET)
    assert answer(connection).startswith(b"HTTP/1.1 200")
    time.sleep(1.0)  # Between requests the server's keep-alive counts, which is longer.
    connection.sendall(GET)
    assert answer(connection).startswith(b"HTTP/1.1 200")
    connection.sendall(GET[:9])
    assert connection.recv(1) == b""


def test_an_answer_takes_the_time_that_it_needs(connect):
    assert answer(connect(GET.replace(b"/ ", b"/slow "))).endswith(b"abcd")
    two = GET.replace(b"/ ", b"/slow ") + GET  # The second one waits until the first is answered.
    connection = connect(two)
    # They may come in one piece.
    found = answer(connection)
    while found.count(b"abcd") < 2 and (more := answer(connection)):
        found += more
    assert found.count(b"abcd") == found.count(b"HTTP/1.1 200 OK") == 2


def test_a_request_in_pieces_is_answered(connect):
    connection = connect(GET[:10])
    time.sleep(0.1)
    connection.sendall(GET[10:])
    assert answer(connection).endswith(b"abcd")
