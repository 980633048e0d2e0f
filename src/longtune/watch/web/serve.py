"""Running the page's server: what it shows, where it listens, and what it says at the start."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from longtune.errors import Problem, UserError
from longtune.watch.runs import holds_run
from longtune.watch.web.guard import Policy, is_loopback
from longtune.watch.web.served import Served

LONGEST_HEAD = 64 << 10
"""Bytes of a request without its body."""


def chosen(named: Sequence[Path]) -> Served:
    """What is served: one folder with all its runs and configs (the current one by default), or some runs alone.

    Raises:
        UserError: a path is no folder, or folders and runs are mixed.
    """
    if not named:
        return Served(Path())
    problems = [Problem(str(path), "there is no such folder") for path in named if not path.is_dir()]
    if problems:
        raise UserError(problems)
    runs = [path.resolve() for path in named if holds_run(path)]
    if not runs and len(named) == 1:
        return Served(named[0])
    if len(runs) < len(named):
        raise UserError(Problem("--web", "serves one folder, or some runs", "name one folder, or run folders only"))
    return Served(Path(os.path.commonpath([run.parent for run in runs])), runs)


def serve(named: Sequence[Path], host: str, port: int) -> None:
    """Serves the page until Ctrl-C.

    Raises:
        UserError: the extra is missing, the address can't be listened on, or there is no such folder.
    """
    try:
        import uvicorn

        from longtune.watch.web.app import make_app
        from longtune.watch.web.patience import Impatient
    except ImportError as error:
        fix = "pip install 'longtune[web]'"
        raise UserError(Problem("--web", f"needs starlette and uvicorn ({error.name} is missing)", fix)) from None
    served = chosen(named)
    policy = Policy.of(host)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    if policy.token is None:
        print(f"{_address(host, port)}  (Ctrl-C ends it; runs go on)", flush=True)
    else:
        name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        print(f"{_address(name, port)}?{urlencode({'token': policy.token})}", flush=True)
        print("Whoever has this address sees the runs and can start and stop them. Nothing is encrypted on the way:")
        print(
            f"from far away, ssh -L {port}:localhost:{port} and the default host are safer. Ctrl-C ends it.", flush=True
        )
    config = uvicorn.Config(
        make_app(served, policy),
        # On h11: the other parser takes headers of any length before the guard is asked.
        http=Impatient,
        h11_max_incomplete_event_size=LONGEST_HEAD,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        # Open pages would otherwise keep the server from ending.
        timeout_graceful_shutdown=1,
        lifespan="off",
        limit_concurrency=256,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        return
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # A name may stand for another machine's address by now.
        if is_loopback(host) and not is_loopback(str(address[0])):
            raise UserError(Problem(host, f"leads to {address[0]}, which is not this machine alone", "use 127.0.0.1"))
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = f"can't be listened on: {error.strerror or error}"
        raise UserError(Problem(f"{host}:{port}", reason, "choose another --port (0: any free one)")) from None


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
