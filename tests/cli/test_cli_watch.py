"""`longtune watch` and `longtune report` through the real command line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from longtune.cli import app
from tests.watch.logs import run_events, train, write_run


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_newest_run_is_told_as_lines_and_as_json(here):
    write_run(here / "runs" / "a", run_events(30))
    told = call("watch").stdout
    assert "done: 30 steps" in told
    state = json.loads(call("watch", "--json").stdout)
    assert (state["run"], state["status"], state["step"], state["exit_code"]) == ("a", "done", 30, 0)
    assert "\n" not in call("watch", "--json").stdout.rstrip("\n")


def test_following_a_run_that_was_killed_or_failed_leaves_with_1(here):
    write_run(here / "runs" / "a", run_events(30, upto=5))
    assert "no process writes this run any more" in call("watch", code=1).stdout
    write_run(here / "runs" / "b", [*run_events(30, upto=5), {"event": "failed", "step": 5, "reason": "x", "t": 1.9e9}])
    assert "failed at step 5: x" in call("watch", "runs/b", code=1).stdout


def test_several_runs_are_one_json_object(here):
    for name in "ab":
        write_run(here / "runs" / name, run_events(30))
    states = json.loads(call("watch", "runs/a", "runs/b", "--json").stdout)["runs"]
    assert [state["run"] for state in states] == ["a", "b"]


def test_there_is_help_where_there_is_no_run(here):
    assert "longtune train" in call("watch", code=2).stderr
    assert "holds no run" in call("report", here, code=2).stderr
    assert "no such folder" in call("watch", "nowhere", code=2).stderr


@pytest.mark.parametrize(
    "arguments", [["--replay", "0"], ["--replay", "nan"], ["--web", "--json"], ["--web", "--replay", "3"]]
)
def test_options_that_make_no_sense_are_refused(here, arguments):
    write_run(here / "runs" / "a")
    assert "fix" in call("watch", *arguments, code=2).stderr


def test_a_port_that_is_taken_is_told(here):
    pytest.importorskip("uvicorn", reason="needs the extra web")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = call("watch", "--web", "--port", taken.getsockname()[1], code=2).stderr
    assert "choose another --port" in said


def test_without_the_extra_the_page_names_it(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "longtune[web]" in call("watch", "--web", code=2).stderr


def test_a_report_is_written_beside_the_run_or_where_it_is_asked_for(here):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    run = write_run(here / "runs" / "a", run_events(30))
    found = json.loads(call("report", "--json").stdout)
    assert found["html"] == str(run / "report.html")
    assert (run / "report.png").stat().st_size > 10_000
    call("report", run, "--out", here / "elsewhere" / "r.html")
    assert (here / "elsewhere" / "r.png").exists()
    assert ".html" in call("report", run, "--out", here / "r.pdf", code=2).stderr
    (here / "file").write_text("x")
    assert "can't be written" in call("report", run, "--out", here / "file" / "r.html", code=2).stderr


def test_without_matplotlib_the_report_is_the_page_alone(here, monkeypatch):
    write_run(here / "runs" / "a", [*run_events(3, upto=2), train(3)])
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("report")
    assert "longtune[report]" in result.stdout
    assert (here / "runs" / "a" / "report.html").exists()


def test_the_verbs_import_nothing_heavy(here):
    write_run(here / "runs" / "a", run_events(3))
    code = (
        "import sys; from longtune.cli import app\n"
        "try: app(['watch', '--json'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'peft', 'starlette', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
