"""Who the page's server answers: hosts, tokens, origins, bodies, names."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from tests.watch.logs import run_events, write_run

pytest.importorskip("starlette", reason="needs the extra web")

from starlette.testclient import TestClient

from longtune.watch.web.app import make_app
from longtune.watch.web.guard import LARGEST_BODY, Policy, is_loopback
from longtune.watch.web.served import Served

HOST = "127.0.0.1:8787"
HOSTILE = [
    "../x",
    "..",
    ".",
    "/",
    "",
    "/etc/passwd",
    "runs/../../outside",
    "runs/a/../a",
    "runs/a/",
    "./runs/a",
    "runs//a",
    "..%2foutside",
    "%2e%2e/outside",
    "runs\\a",
    "runs/a\x00",
    "\x00",
    "<script>alert(1)</script>",
    "a" * 3000,
    "runs/a\n",
    "метрики",
    ".hidden",
    "link",
]


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    write_run(root / "runs" / "a", run_events(10))
    write_run(root / ".hidden")
    write_run(tmp_path / "outside")
    (tmp_path / "outside.yaml").write_text("data: x\n")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    return root


def make(root, policy=None, host=HOST, **options):
    app = make_app(Served(root), policy or Policy.of("127.0.0.1"))
    return TestClient(app, base_url=f"http://{host}", **options)


@pytest.fixture
def client(root):
    with make(root) as made:
        yield made


def post(client, path, body="{}", **headers):
    sent = {"origin": f"http://{HOST}", "content-type": "application/json", **headers}
    return client.post(path, content=body, headers={name: value for name, value in sent.items() if value is not None})


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/api/run", "/api/series", "/api/samples", "/api/diff", "/api/stream"])
def test_a_name_that_is_not_listed_leads_nowhere(client, path, name):
    answer = client.get(path, params={"run": name})
    assert answer.status_code in (404, 414)
    assert "root:" not in answer.text
    assert name not in answer.text or len(name) < 2


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path, key", [("/api/start", "config"), ("/api/stop", "run"), ("/api/resume", "run")])
def test_nothing_is_started_or_stopped_by_a_name_that_is_not_listed(client, path, key, name):
    import json

    assert post(client, path, json.dumps({key: name})).status_code == 404


@pytest.mark.parametrize("name", ["link.yaml", "../outside.yaml", "runs/a/config.yaml", "runs/a/metrics.jsonl"])
def test_only_configs_of_the_folder_can_be_started(client, name):
    assert post(client, "/api/start", f'{{"config": "{name}"}}').status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/page/../served.py",
        "/page/..%2fserved.py",
        "/page/%2e%2e/guard.py",
        "/page//etc/passwd",
        "/page/",
        "/page",
        "/page/main.js/",
        "/../../etc/passwd",
        "/metrics.jsonl",
        "/runs/a/metrics.jsonl",
        "/docs",
    ],
)
def test_only_the_files_of_the_page_are_served(client, path):
    assert client.get(path, follow_redirects=False).status_code in (404, 307)
    assert client.get(path).status_code == 404 or "longtune" in client.get(path).text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8787", "0.0.0.0:8787", "", "10.0.0.5", "[::2]:80"]
)
def test_a_foreign_name_for_this_machine_is_refused(client, host):
    for path in ("/", "/api/runs", "/page/main.js"):
        assert client.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "localhost:9999", "LOCALHOST", "[::1]:8787", "127.0.0.1"])
def test_this_machine_by_its_own_names_is_answered_also_through_a_tunnel(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_a_host_that_is_named_twice_is_refused(root):
    with make(root) as client:
        answer = client.get("/", headers=[("host", "127.0.0.1"), ("host", "evil.example")])
    assert answer.status_code == 421


@pytest.mark.parametrize(
    "headers, code",
    [
        ({"origin": None}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:8788"}, 403),
        ({"origin": f"http://{HOST}.evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": None}, 415),
        ({"content-length": "-1"}, 413),
        ({"content-length": "0" * 5000 + "2"}, 413),
        ({"content-length": b"\xb2"}, 413),
        ({}, 400),
        ({"sec-fetch-site": "same-origin", "content-type": "application/json; charset=utf-8"}, 400),
    ],
)
def test_only_the_page_itself_may_post(client, headers, code):
    for path in ("/api/start", "/api/stop", "/api/resume"):
        assert post(client, path, **headers).status_code == code


def test_a_body_that_is_too_large_is_refused_whatever_its_header_says(client):
    assert post(client, "/api/start", "x" * (LARGEST_BODY + 1)).status_code == 413

    def pieces():
        for _ in range(100):
            yield b"x" * 1000

    headers = {"origin": f"http://{HOST}", "content-type": "application/json"}
    assert client.post("/api/start", content=pieces(), headers=headers).status_code == 413


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "3", '"x"', '{"config": 3}', '{"config": ["new.yaml"]}', '{"job": "1"}']
)
def test_a_body_that_says_nothing_is_a_clear_answer(client, body):
    answers = [post(client, path, body) for path in ("/api/start", "/api/stop", "/api/resume")]
    assert {answer.status_code for answer in answers} == {400}
    assert all(answer.json()["error"] for answer in answers)


@pytest.mark.parametrize("query", ["points=x", "points=nan", "points=inf", "first=1e999", "last=", "first=[1]"])
def test_numbers_must_be_numbers(client, query):
    assert client.get(f"/api/series?run=runs/a&{query}").status_code == 400


def test_questions_about_too_many_runs_are_refused(client):
    assert client.get("/api/diff", params={"run": [str(n) for n in range(9)]}).status_code == 400
    assert client.get("/api/run").status_code == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused(client, method):
    assert client.request(method, "/api/runs").status_code == 405


def test_changing_something_needs_a_post(client):
    assert client.get("/api/start").status_code == 405
    assert post(client, "/api/runs").status_code == 405


def test_every_answer_forbids_foreign_scripts_frames_and_caches(client):
    answers = [client.get(path) for path in ("/", "/api/runs", "/page/main.js", "/nothing", "/api/run?run=x")]
    answers += [client.get("/", headers={"host": "evil.example"}), post(client, "/api/start", origin=None)]
    for answer in answers:
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; object-src 'none'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in answers[0].headers["content-security-policy"]


def test_a_token_is_wanted_exactly_where_others_can_reach_the_server():
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert is_loopback(host)
        assert Policy.of(host).token is None
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org", ""):
        assert not is_loopback(host)
        assert len(Policy.of(host).token or "") >= 40
    assert Policy.of("0.0.0.0").token != Policy.of("0.0.0.0").token


@pytest.fixture
def away(root):
    """A server that other machines can reach, and its token."""
    policy = Policy.of("0.0.0.0")
    with make(root, policy, "192.168.1.7:8787") as client:
        yield client, policy.token


def test_without_the_right_token_nothing_is_told(away):
    client, token = away
    wrong = [None, "", "x", token[:-1], token + "x", token.upper(), "é"]
    for path in ("/", "/api/runs", "/page/main.js", "/nothing", "/api/run?run=runs/a"):
        for given in wrong:
            answer = client.get(path, params={} if given is None else {"token": given})
            assert answer.status_code == 403, (path, given)
            assert token not in answer.text
    headers = {"origin": "http://192.168.1.7:8787", "content-type": "application/json"}
    assert client.post("/api/stop", content='{"run": "runs/a"}', headers=headers).status_code == 403


def test_the_token_moves_from_the_address_into_a_cookie(away):
    client, token = away
    answer = client.get(f"/?token={token}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert client.get("/api/runs").status_code == 200, "the cookie is enough from now on"
    assert client.get("/").status_code == 200
    # A stale address with an old token must not be let in by the cookie alone, nor lock anybody out for good.
    assert client.get("/?token=old", follow_redirects=False).status_code == 403
    assert client.get("/").status_code == 200


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "//evil.example//x"])
def test_the_way_back_from_the_token_stays_here(away, path):
    client, token = away
    answer = client.get(f"http://192.168.1.7:8787{path}?token={token}", follow_redirects=False)
    location = answer.headers.get("location", "/")
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))


def test_a_token_does_not_make_up_for_a_foreign_name_or_origin(away):
    client, token = away
    assert client.get(f"/?token={token}", headers={"host": "evil.example"}).status_code == 421
    client.get(f"/?token={token}")
    headers = {"origin": "http://evil.example", "content-type": "application/json"}
    assert client.post("/api/stop", content='{"run": "runs/a"}', headers=headers).status_code == 403


@pytest.mark.parametrize(
    "cookie", ["", ";;;", "{name}", "a=b; {name}=\x7f", "{name}=" + "x" * 5000, "{name}=wrong", "other={token}"]
)
def test_broken_cookies_are_no_token(away, cookie):
    client, token = away
    name = Policy(frozenset(), token=token).cookie
    sent = cookie.format(name=name, token=token)
    assert client.get("/", headers={"cookie": sent}).status_code == 403
    assert client.get("/", headers={"cookie": f"other=1; {name}={token}"}).status_code == 200


def test_two_servers_of_one_machine_keep_their_cookies_apart():
    assert Policy.of("0.0.0.0").cookie != Policy.of("0.0.0.0").cookie


@pytest.fixture
def port(root):
    """A server of its own, as the verb starts it."""
    pytest.importorskip("uvicorn", reason="needs the extra web")
    command = [sys.executable, "-m", "longtune.cli", "watch", "--web", "--port", "0", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().split(":")[2].split("/")[0])
        process.terminate()


@pytest.mark.parametrize("head", ["GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", "GET /"])
def test_a_head_without_end_is_cut_off(port, head):
    block = b"a" * (64 << 10)
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection, contextlib.suppress(OSError):
        connection.sendall(head.encode())
        while sent < 64 << 20:
            connection.sendall(block)
            sent += len(block)
    assert sent < 32 << 20, "only the buffers of the connection take it"


def test_an_upgrade_is_an_ordinary_request(port):
    wanted = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHg=\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(f"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n{wanted}\r\n".encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 404")
