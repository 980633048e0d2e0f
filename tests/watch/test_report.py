"""The report: one file that holds everything, safe to open, with and without matplotlib."""

from __future__ import annotations

import html.parser
import re
import sys

import numpy as np
import pytest

from longtune.watch import picture
from longtune.watch.charts import CHARTS
from longtune.watch.report import page
from longtune.watch.runs import WatchedRun
from longtune.watch.series import Buckets
from longtune.watch.svg import Line, chart, ticks
from tests.watch.logs import checkpoint, meta, run_events, samples, train, validation, write_run

VOID = {"meta", "line", "circle", "path", "br"}


class Checked(html.parser.HTMLParser):
    """Fails on tags that are not closed, and collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data + "\n"


def reported(folder, events=None):
    run = WatchedRun(write_run(folder, events))
    run.refresh()
    return run


def test_it_holds_the_whole_run(tmp_path):
    run = reported(tmp_path / "run", run_events(100, pairs=True))
    (run.folder / "adapter").mkdir()
    (run.folder / "checkpoints" / "step-00100").mkdir(parents=True)
    found = Checked(page(run))
    for word in (
        "100 of 100",
        "dpo",
        "accuracy, validation",
        "100.0%",
        "Plan and measured",
        "2.00 GiB",
        "key value store",
        "256 MiB",
        "9 rows of chat",
        "1,234",
        "Sample answers",
        "answer at 25",
        "answer at 100",
        "step-00100",
        "best",
        "removed since",
        "adapter",
        "python",
        "rows.jsonl",
    ):
        assert word in found.text, word
    assert found.tags.count("svg") == len(CHARTS)


def test_it_needs_no_script_and_nothing_from_elsewhere(tmp_path):
    text = page(reported(tmp_path / "run"))
    found = Checked(text)
    assert "script" not in found.tags
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in found.attributes}
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme:dark" in text


def test_hostile_runs_stay_text(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    events = [meta(3, model=evil, method=evil, data=[evil]), train(1), samples(1, evil), validation(1)]
    events += [
        {"event": "warning", "step": 1, "reason": evil},
        {"event": "failed", "step": 1, "reason": evil, "t": 1.8e9},
    ]
    run = reported(tmp_path / "run", events)
    (run.folder / "config.yaml").write_text(evil)
    (run.folder / "environment.json").write_text('{"a": "</pre><script>"}')
    run.name = evil
    found = Checked(page(run))
    assert not {"script", "img"} & set(found.tags)
    assert found.text.count("<script>alert(1)</script>") >= 6


@pytest.mark.parametrize(
    "events",
    [
        [],
        [meta(9)],
        [meta(9), train(1)],
        [meta(9), {**train(1), "loss": None, "grad_norm": None}],
        [meta(9), train(1), samples(1)],
        [meta(9), train(1), {"event": "samples", "step": 1, "items": "no"}],
        [meta(9), train(1), checkpoint(1), validation(1)],
        [meta(9, data="text", rows=None), train(1, loss=0.0)],
    ],
    ids=["empty", "meta", "one", "nan", "no answers", "broken samples", "checkpoint", "odd meta"],
)
def test_a_run_with_little_to_say_has_a_report_too(tmp_path, events):
    run = reported(tmp_path / "run", events)
    for name in ("plan.json", "environment.json", "config.yaml"):
        (run.folder / name).unlink()
    Checked(page(run))


@pytest.mark.parametrize("loss", [None, 1.0])
def test_a_picture_of_nearly_nothing_is_a_picture(tmp_path, loss):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    run = reported(tmp_path / "run", [meta(9), {**train(1), "loss": loss}])
    picture.draw(run, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_a_png_of_every_chart(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    run = reported(tmp_path / "run", run_events(60, pairs=True))
    run.name = "costs $5 and $6"
    picture.draw(run, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".tmp"] == []


def test_without_matplotlib_there_is_an_import_error_to_tell(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        picture.draw(reported(tmp_path / "run"), tmp_path / "run.png")


def test_a_long_run_makes_a_small_page(tmp_path):
    steps = np.arange(1.0, 100_001.0)
    losses = np.random.default_rng(0).random(100_000)
    losses[50_000] = 40.0
    drawn = chart("loss", [Line("training", Buckets.of(steps, losses, 400), weight=0.9)], lambda value: f"{value:g}")
    assert len(drawn) < 40_000
    assert "80,000" in drawn


def test_gaps_break_the_line_and_a_far_level_does_not_flatten_it():
    steps = np.arange(5.0)
    gap = Buckets.of(steps, np.array([1.0, 2.0, np.nan, 2.0, 1.0]), 10)
    drawn = chart("x", [Line("", gap)], str, level=("planned", 1e9))
    assert drawn.count("M", drawn.index("path")) == 2
    assert "planned" not in drawn
    assert "planned 3" in chart("x", [Line("", gap)], lambda value: f"{value:g}", level=("planned", 3.0))
    assert chart("x", [Line("", Buckets.of(steps, np.full(5, np.nan), 10))], str) == ""


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (-3.7, 12.0), (1e-9, 2e-9), (5.0, 5.1), (0.0, 3e12)])
def test_ticks_are_round_and_inside(low, high):
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 11
    assert all(low - 1e-12 <= tick <= high * (1 + 1e-12) for tick in found)
