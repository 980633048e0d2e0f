"""What the page's server answers, from a folder of runs."""

from __future__ import annotations

import json

import pytest

from tests.watch.logs import held, lines, meta, run_events, train, write_run

pytest.importorskip("starlette", reason="needs the extra web")
pytest.importorskip("uvicorn", reason="needs the extra web")

from starlette.testclient import TestClient

from longtune.errors import UserError
from longtune.watch.web import served as room
from longtune.watch.web.app import make_app
from longtune.watch.web.guard import Policy
from longtune.watch.web.serve import chosen
from longtune.watch.web.served import Served, flat, read_yaml

HERE = {"base_url": "http://127.0.0.1:8787"}


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "runs" / "a", run_events(100))
    write_run(tmp_path / "runs" / "b", run_events(100, upto=60, pairs=True), rank=8, train={"steps": 7})
    (tmp_path / "new.yaml").write_text("data: rows.jsonl\nmodel: smollm2\noutput: runs/new\n")
    (tmp_path / "notes.yaml").write_text("- not a config\n")
    return tmp_path


@pytest.fixture
def client(root):
    with TestClient(make_app(Served(root), Policy.of("127.0.0.1")), **HERE) as made:
        yield made


def got(client, path, code=200, **query):
    answer = client.get(path, params=query)
    assert answer.status_code == code, answer.text
    return answer.json()


def test_the_list_has_every_run_in_a_few_figures(client):
    found = got(client, "/api/runs")
    assert found["may_start"]
    by_name = {run["run"]: run for run in found["runs"]}
    assert by_name.keys() == {"runs/a", "runs/b"}
    assert by_name["runs/a"]["status"] == "done"
    assert (by_name["runs/b"]["status"], by_name["runs/b"]["step"], by_name["runs/b"]["steps"]) == ("gone", 60, 100)
    assert by_name["runs/a"]["smoothed_loss"] == pytest.approx(0.6, abs=0.05)


def test_the_list_needs_only_the_ends_of_long_logs(root, client, monkeypatch):
    monkeypatch.setattr(room, "_GLANCE", 2000)
    whole = got(client, "/api/run", run="runs/b")
    told = next(run for run in got(client, "/api/runs")["runs"] if run["run"] == "runs/b")
    assert {key: told[key] for key in ("step", "steps", "method", "model")} == {
        key: whole[key] for key in ("step", "steps", "method", "model")
    }


def test_a_run_has_its_state_events_plan_config_and_environment(client):
    found = got(client, "/api/run", run="runs/a")
    assert (found["step"], found["status"], found["samples"]) == (100, "done", 4)
    assert found["plan"]["predicted"]["peak_bytes"] == 2**31
    assert "smollm2" in found["config"]
    assert found["environment"]["python"] == "3.11"
    assert found["events"][-1]["lines"][0].startswith("done: 100 steps")
    assert found["meta"]["data"] == ["9 rows of chat"]


def test_series_come_in_buckets_and_ranges(client):
    found = got(client, "/api/series", run="runs/a", points=10)
    loss = found["train"]["loss"]
    assert len(loss["step"]) == len(loss["mean"]) == len(loss["low"]) == len(loss["high"]) == 10
    assert found["validation"]["loss"]["step"] == [25, 50, 75, 100]
    assert "step" not in found["train"]
    near = got(client, "/api/series", run="runs/a", points=10, first=40, last=44)
    assert near["train"]["loss"]["step"] == [40, 41, 42, 43, 44]
    assert len(got(client, "/api/series", run="runs/a", points=10**9)["train"]["loss"]["step"]) == 100


def test_samples_are_strings_whatever_the_file_says(root, client):
    items = [{"prompt": [{"role": "user", "content": "hi"}], "answer": 7}, "no", None, {"answer": "only"}]
    events = [meta(3), train(1), {"event": "samples", "step": 1, "items": items, "t": 1.8e9}]
    events += [{"event": "samples", "step": 2, "items": 5}]
    write_run(root / "runs" / "c", events)
    found = got(client, "/api/samples", run="runs/c")
    expected = [{"prompt": "user: hi", "answer": "7"}, {"answer": "only"}]
    assert found == [{"step": 1, "items": expected}, {"step": 2, "items": []}]


def test_the_difference_of_configs_names_what_differs(client):
    found = got(client, "/api/diff", run=["runs/a", "runs/b"])
    assert found["rows"] == [
        {"key": "lora.rank", "values": ["16", "8"]},
        {"key": "train.steps", "values": [None, "7"]},
    ]
    assert found["same"] == 4


def test_configs_are_those_that_name_data_and_hold_no_run(client):
    assert got(client, "/api/configs") == [{"config": "new.yaml", "model": "smollm2", "output": "runs/new"}]


def test_a_stream_tells_the_state_and_its_changes(root, monkeypatch):
    monkeypatch.setattr("longtune.watch.web.app.POLL", 0.05)
    monkeypatch.setattr(room, "FRESH", 0.0)
    run = write_run(root / "runs" / "live", run_events(100, upto=10))
    served = Served(root)

    async def listened():
        from longtune.watch.web.app import _changes

        streams: set[object] = set()
        seen = []
        changes = _changes(served, ["runs/live"], streams)
        async for block in changes:
            if block.startswith(b"event: run"):
                seen.append(json.loads(block.split(b"data: ")[1])["step"])
                with (run / "metrics.jsonl").open("ab") as out:
                    out.write(lines([train(seen[-1] + 1)]))
            if len(seen) == 3:
                break
        assert len(streams) == 1
        await changes.aclose()
        return seen, streams

    import asyncio

    with held(run):
        seen, streams = asyncio.run(listened())
    assert seen == [10, 11, 12]
    assert not streams, "a page that is closed gives its place back"


def test_a_run_that_appears_later_is_listed(root, client, monkeypatch):
    monkeypatch.setattr(room, "LISTED", 0.0)
    got(client, "/api/runs")
    write_run(root / "runs" / "later")
    assert "runs/later" in {run["run"] for run in got(client, "/api/runs")["runs"]}


def test_a_run_that_is_removed_is_a_clear_answer(root, client, monkeypatch):
    import shutil

    monkeypatch.setattr(room, "LISTED", 0.0)
    got(client, "/api/run", run="runs/a")
    shutil.rmtree(root / "runs" / "a")
    assert "no such run" in got(client, "/api/run", code=404, run="runs/a")["error"]
    assert len(got(client, "/api/runs")["runs"]) == 1


def test_a_run_whose_name_is_no_text_and_one_that_cannot_be_read_leave_the_list_whole(root, client, monkeypatch):
    import os

    write_run(root / "runs" / os.fsdecode(b"caf\xe9"), run_events(3))
    found = {run["run"]: run for run in got(client, "/api/runs")["runs"]}
    assert found["runs/caf?"]["step"] == 3
    assert got(client, "/api/run", run="runs/caf?")["step"] == 3
    real = room._glanced

    def unreadable(folder, name):
        if name == "runs/a":
            raise PermissionError(13, "Permission denied")
        return real(folder, name)

    monkeypatch.setattr(room, "_glanced", unreadable)
    assert {run["run"] for run in Served(root).overview()} == {"runs/b", "runs/caf?"}


def test_few_runs_are_kept_in_memory(root, monkeypatch):
    monkeypatch.setattr(room, "OPEN_RUNS", 2)
    for number in range(4):
        write_run(root / "runs" / str(number), run_events(3))
    served = Served(root)
    for number in range(4):
        assert served.run(f"runs/{number}").state.step == 3
    assert len(served._open) == 2


def test_a_folder_without_runs_and_a_run_without_events(tmp_path):
    with TestClient(make_app(Served(tmp_path), Policy.of("127.0.0.1")), **HERE) as client:
        assert got(client, "/api/runs")["runs"] == []
        write_run(tmp_path / "empty", [])
    with TestClient(make_app(Served(tmp_path), Policy.of("127.0.0.1")), **HERE) as client:
        assert got(client, "/api/runs")["runs"][0]["status"] == "starting"
        assert got(client, "/api/run", run="empty")["step"] == 0
        assert got(client, "/api/series", run="empty") == {"train": {}, "validation": {}}


def test_what_is_served_follows_what_is_named(root, monkeypatch):
    monkeypatch.chdir(root)
    assert chosen([]).root == root
    assert chosen([root]).may_start
    alone = chosen([root / "runs" / "a"])
    assert not alone.may_start
    assert (alone.runs().keys(), alone.configs()) == ({"a"}, {})
    both = chosen([root / "runs" / "a", root / "runs" / "b"])
    assert both.runs().keys() == {"a", "b"}
    with pytest.raises(UserError, match="one folder, or some runs"):
        chosen([root, root / "runs" / "a"])
    with pytest.raises(UserError, match="no such folder"):
        chosen([root / "nowhere"])


def test_every_file_of_the_page_is_served_with_its_type(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for name, kind in (("main.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        answer = client.get(f"/page/{name}")
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind)


def test_the_page_asks_no_other_machine_and_makes_no_markup_of_text(client):
    from importlib import resources

    for file in resources.files("longtune.watch.web").joinpath("page").iterdir():
        text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        for word in ("http://", "https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, (file.name, word)
        assert file.name != "index.html" or "<style" not in text


@pytest.mark.parametrize(
    "value", ['"\\ud800"', f"0x{'f' * 6000}", "1e400", ".nan", "!!set {a}", "!!binary aGVs", "2001-01-01"]
)
def test_a_config_with_values_that_are_not_text_leaves_the_answers_whole(root, client, value):
    text = f"data: x\nmodel: {value}\nlora: {{rank: {value}}}\n"
    (root / "runs" / "a" / "config.yaml").write_text(text)
    (root / "odd.yaml").write_text(text)
    assert {"new.yaml", "odd.yaml"} <= {config["config"] for config in got(client, "/api/configs")}
    rows = got(client, "/api/diff", run=["runs/a", "runs/b"])["rows"]
    assert "model" in {row["key"] for row in rows}


def test_a_folder_whose_name_is_no_text_is_served(tmp_path):
    import os

    root = tmp_path / os.fsdecode(b"caf\xe9")
    write_run(root / "a", run_events(3))
    with TestClient(make_app(Served(root), Policy.of("127.0.0.1")), base_url="http://127.0.0.1") as client:
        assert got(client, "/api/runs")["root"].endswith("caf?")
        assert got(client, "/api/run", run="a")["step"] == 3


def test_yaml_with_aliases_or_objects_is_not_read():
    assert read_yaml("a: &x [1]\nb: *x\n") is None
    assert read_yaml("a: !!python/object/apply:os.system [ls]\n") is None
    assert read_yaml("[" * 5000) is None
    assert flat(read_yaml("a: {b: 1, c: {d: null}}\nl: [1, 2]\n")) == {"a.b": "1", "a.c.d": "null", "l": "[1, 2]"}
    assert flat("text") == {}
