"""Who may ask the page's server for what: checked before any other code sees a request.

- Host: only names of this machine, so that a foreign page can't reach the server by pointing its own name here
  (DNS rebinding).
- Token: wanted wherever the server can be reached from other machines; given once in the address, then in a cookie that
  scripts can't read and other sites can't send; compared in constant time.
- POST: only from the page itself (Origin, and no form's content type), with a small body.
- Every answer forbids foreign scripts, frames and guessing of content types, and is kept in no cache.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LARGEST_BODY = 4096
LONGEST_TARGET = 4096

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is let through.

    Attributes:
        hosts: names in the Host header, lower case, without a port.
        any_address: whether every numeric address is a name, too (bound to all interfaces).
        token: wanted with every request; None where only this machine can ask.
    """

    hosts: frozenset[str]
    any_address: bool = False
    token: str | None = None

    @classmethod
    def of(cls, host: str) -> Policy:
        """The policy of a server bound to `host`."""
        own = frozenset({"localhost", "127.0.0.1", "::1"})
        if is_loopback(host):
            return cls(own | {_bare(host)})
        names = {_bare(host), socket.gethostname().lower(), socket.getfqdn().lower()}
        return cls(own | names, any_address=True, token=secrets.token_urlsafe(32))

    @property
    def cookie(self) -> str:
        """The cookie's name; its own for each server, as browsers give one port's cookies to the others, too."""
        return f"longtune-{hashlib.sha256((self.token or '').encode()).hexdigest()[:12]}"

    def knows(self, host: str) -> bool:
        """Whether a Host header names this machine."""
        name = _bare(host)
        return name in self.hosts or (self.any_address and _address(name) is not None)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address of that name."""
    if _bare(host) == "localhost":
        return True
    address = _address(_bare(host))
    return address is not None and address.is_loopback


class Guard:
    """ASGI middleware that lets through what a policy allows.

    Args:
        app: the application.
        policy: the rules.
    """

    def __init__(self, app: Any, policy: Policy):
        self._app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in HEADERS}
                kept = [(name, value) for name, value in message.get("headers", []) if name.lower() not in own]
                message = {**message, "headers": [*kept, *HEADERS]}
            await send(message)

        headers = _headers(scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(guarded_send, *refusal)
        elif (redirect := self._admission(scope)) is not None:
            await _answer(guarded_send, 303, "", redirect)
        elif scope["method"] == "POST":
            body = await _read(receive)
            if body is None:
                await _answer(guarded_send, 413, "the body is too large")
            else:
                await self._app(scope, _replaying(body, receive), guarded_send)
        else:
            await self._app(scope, receive, guarded_send)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """(status, reason) where the request is not let through."""
        if not self._policy.knows(headers.get("host", "")):
            return 421, "this name is not this server's"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "this method is not known here"
        if len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) > LONGEST_TARGET:
            return 414, "the address is too long"
        if not self._admitted(scope, headers):
            return 403, "a token is needed: open the address that `longtune watch --web` printed"
        if scope["method"] != "POST":
            return None
        if not _same_origin(headers):
            return 403, "only the page itself may ask for this"
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return 415, "the body must be JSON"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > LARGEST_BODY:
            return 413, "the body is too large"
        return None

    def _admitted(self, scope: Scope, headers: dict[str, str]) -> bool:
        if self._policy.token is None:
            return True
        given = _query(scope).get("token") or _cookie(headers.get("cookie", ""), self._policy.cookie)
        return secrets.compare_digest(given.encode(), self._policy.token.encode())

    def _admission(self, scope: Scope) -> list[tuple[bytes, bytes]] | None:
        """Headers that move a token from the address into a cookie; it was right."""
        query = _query(scope)
        if self._policy.token is None or "token" not in query or scope["method"] != "GET":
            return None
        del query["token"]
        # "//host" at the start of a path would lead to another server.
        path = "/" + scope["path"].lstrip("/\\")
        target = urlsplit(path).path + (f"?{urlencode(query)}" if query else "")
        cookie = f"{self._policy.cookie}={self._policy.token}; Path=/; HttpOnly; SameSite=Strict"
        return [(b"location", target.encode()), (b"set-cookie", cookie.encode())]


def _headers(scope: Scope) -> dict[str, str]:
    """Headers by name. One that comes twice has no value: two readers could take different ones."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        found[key] = "" if key in found else value.decode("latin-1")
    return found


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1")))


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _same_origin(headers: dict[str, str]) -> bool:
    origin, host = headers.get("origin", ""), headers.get("host", "")
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    return bool(host) and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _bare(host: str) -> str:
    """A host's name without its port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None where it is larger than allowed, whatever its header said."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > LARGEST_BODY:
            return None
        if not message.get("more_body"):
            return body


def _replaying(body: bytes, receive: Receive) -> Receive:
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = text.encode()
    start = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*start, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})
