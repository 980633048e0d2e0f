"""The page's requests and answers: what can be asked, in which form, and the stream of changes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from longtune.watch.runs import as_text
from longtune.watch.web.guard import Guard, Policy
from longtune.watch.web.jobs import Jobs, Refused
from longtune.watch.web.served import Served, Unknown

MOST_RUNS = 8
"""Runs in one question."""
MOST_STREAMS = 32
POLL = 1.0
"""Seconds between looks at the files for a stream."""
HEARTBEAT = 15
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def make_app(served: Served, policy: Policy, jobs: Jobs | None = None) -> Starlette:
    """The application.

    Args:
        served: what is shown.
        policy: who may ask.
        jobs: starts and stops runs; made for the served folder by default.
    """
    jobs = jobs or Jobs(served.root)
    streams: set[object] = set()

    def runs(request: Request) -> Response:
        return _json({"root": as_text(str(served.root)), "may_start": served.may_start, "runs": served.overview()})

    def run(request: Request) -> Response:
        return _json(served.page(_name(request)))

    def series(request: Request) -> Response:
        points = int(_number(request, "points", 600))
        first, last = _number(request, "first", None), _number(request, "last", None)
        return _json(served.series(_name(request), points, first, last))

    def samples(request: Request) -> Response:
        return _json(served.samples(_name(request)))

    def difference(request: Request) -> Response:
        return _json(served.difference(_names(request)))

    def configs(request: Request) -> Response:
        return _json(served.described_configs())

    def listed_jobs(request: Request) -> Response:
        return _json(jobs.listed())

    def start(body: dict[str, Any]) -> dict[str, Any]:
        name = _text(body, "config")
        file = served.configs().get(name)
        if file is None:
            raise Unknown(name)
        served.forget_listing()
        return jobs.start(name, file).as_dict()

    def resume(body: dict[str, Any]) -> dict[str, Any]:
        if not served.may_start:
            raise Refused("only runs of a served folder can be resumed here")
        watched = served.run(_text(body, "run"))
        return jobs.start(watched.name, watched.folder, "--resume").as_dict()

    def stop(body: dict[str, Any]) -> dict[str, Any]:
        if isinstance(body.get("job"), int):
            return {"pid": jobs.stop_job(body["job"])}
        return {"pid": jobs.stop(served.run(_text(body, "run")).folder)}

    async def stream(request: Request) -> Response:
        names = _names(request, least=0)
        for name in names:
            await run_in_threadpool(served.run, name)
        if len(streams) >= MOST_STREAMS:
            raise HTTPException(503, "too many pages are open")
        return StreamingResponse(_changes(served, names, streams), media_type="text/event-stream")

    routes = [
        Route("/api/runs", runs),
        Route("/api/run", run),
        Route("/api/series", series),
        Route("/api/samples", samples),
        Route("/api/diff", difference),
        Route("/api/configs", configs),
        Route("/api/jobs", listed_jobs),
        Route("/api/stream", stream),
        Route("/api/start", _post(start), methods=["POST"]),
        Route("/api/resume", _post(resume), methods=["POST"]),
        Route("/api/stop", _post(stop), methods=["POST"]),
        *_files(),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, policy=policy)],
        exception_handlers={Unknown: _unknown, Refused: _refused, HTTPException: _failed},
    )


def _files() -> list[Route]:
    """One route for each file of the page: no path is ever made of what is asked for."""
    routes = []
    for file in sorted(resources.files("longtune.watch.web").joinpath("page").iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            where = "/" if file.name == "index.html" else f"/page/{file.name}"
            routes.append(Route(where, _file(file.read_bytes(), kind)))
    return routes


def _file(content: bytes, kind: str) -> Callable[[Request], Response]:
    return lambda request: Response(content, media_type=kind)


async def _changes(served: Served, names: Sequence[str], streams: set[object]) -> AsyncIterator[bytes]:
    """Server-sent events: the state of each run, or of the list of runs, whenever it has changed."""
    mark = object()
    streams.add(mark)
    try:
        last: dict[str, bytes] = {}
        quiet = 0.0
        yield b": hello\n\n"
        while True:
            told = await run_in_threadpool(_told, served, names)
            for name, text in told.items():
                if last.get(name) != text:
                    quiet = 0.0
                    yield b"event: %s\ndata: %s\n\n" % (b"run" if names else b"runs", text)
            last = told
            if quiet >= HEARTBEAT:
                quiet = 0.0
                yield b": still here\n\n"
            await asyncio.sleep(POLL)
            quiet += POLL
    finally:
        streams.discard(mark)


def _told(served: Served, names: Sequence[str]) -> dict[str, bytes]:
    if not names:
        return {"": orjson.dumps(served.overview())}
    found = {}
    for name in names:
        try:
            found[name] = orjson.dumps(served.run(name).facts())
        except Unknown:
            # Its folder was removed.
            continue
    return found


def _post(work: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError:
            raise HTTPException(400, "the body must be JSON") from None
        if not isinstance(body, dict):
            raise HTTPException(400, "the body must be an object")
        return _json(await run_in_threadpool(work, body))

    return endpoint


def _name(request: Request) -> str:
    names = _names(request)
    if len(names) != 1:
        raise HTTPException(400, "one run must be named")
    return names[0]


def _names(request: Request, least: int = 1) -> list[str]:
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not least <= len(names) <= MOST_RUNS:
        raise HTTPException(400, f"name {least} to {MOST_RUNS} runs")
    return names


def _number(request: Request, key: str, default: float | None) -> Any:
    given = request.query_params.get(key)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{key} must be a number")
    return value


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise HTTPException(400, f"{key} must be named")
    return value


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value, default=str), status, media_type="application/json")


def _unknown(request: Request, error: Exception) -> Response:
    return _json({"error": "there is no such run or config here"}, 404)


def _refused(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 409)


def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code)
