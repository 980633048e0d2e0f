"""The terminal's picture: kept as text at three sizes, and sound at every size.

`python -m tests.watch.test_screen` writes the kept pictures anew; look at what changed before committing them.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from longtune.watch.alerts import Surroundings
from longtune.watch.plot import Curve, bar, plot, sparkline
from longtune.watch.runs import WatchedRun
from longtune.watch.screen import Options, screen
from tests.watch.logs import checkpoint, meta, run_events, samples, train, validation, write_run

KEPT = Path(__file__).parent / "snapshots"
SIZES = [(80, 24), (120, 40), (200, 50)]


def watched(folder, events, **around):
    run = WatchedRun(write_run(folder, events))
    for event in events:
        run.state.update(event)
    now = (run.state.last_t or 0.0) + around.pop("quiet", 1.0)
    run.surroundings = Surroundings(**{"now": now, "held": True, "predicted": {"peak_bytes": 2**31}, **around})
    return run


def text(runs, options, width, height, **console):
    """What stands on the screen, without trailing blanks."""
    out = io.StringIO()
    made = Console(file=out, width=width, height=height, **{"color_system": None, "force_terminal": True, **console})
    for line in screen(runs, options, width, height):
        made.print(line, crop=False, overflow="ignore")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def pictures(folder):
    """Every kept picture by name."""
    sft = watched(folder / "contracts", run_events(100, upto=80))
    pairs = watched(folder / "pairs", run_events(100, upto=64, pairs=True))
    trouble = [meta(100), *(train(step, loss=1 + step / 20) for step in range(1, 60)), checkpoint(50)]
    trouble += [{**train(60), "loss": None}, validation(60, 2.0), validation(61, 3.0)]
    bad = watched(folder / "trouble", trouble, quiet=7000.0, pid=4711, free_bytes=2**29)
    ended = watched(folder / "other", run_events(100, pairs=True), held=False)
    found = {}
    for width, height in SIZES:
        size = f"{width}x{height}"
        found[f"run-{size}"] = text([sft], Options(), width, height)
        found[f"pairs-{size}"] = text([pairs], Options(), width, height)
        found[f"compare-{size}"] = text([sft, pairs, ended], Options(), width, height)
    found["trouble-80x24"] = text([bad], Options(), 80, 24)
    found["ascii-80x24"] = text([pairs], Options(ascii_only=True, mono=True), 80, 24)
    found["compare-ascii-80x24"] = text([sft, pairs], Options(ascii_only=True, mono=True), 80, 24)
    found["memory-120x40"] = text([sft], Options(chart=4), 120, 40)
    return found


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("screen"))


def test_every_picture_is_as_it_was_kept(drawn):
    kept = {file.stem: file.read_text(encoding="utf-8") for file in KEPT.glob("*.txt")}
    assert drawn.keys() == kept.keys()
    for name, picture in drawn.items():
        assert picture == kept[name], name


def test_every_picture_says_what_matters(drawn):
    for name, picture in drawn.items():
        if name.startswith("run-"):
            for word in (
                "contracts",
                "running",
                "80/100",
                "ETA",
                "loss",
                "validation",
                "learning rate",
                "gradient norm",
            ):
                assert word in picture, (name, word)
            assert "tokens/s" in picture
            assert "/ 2.00 GiB plan" in picture
        if name.startswith("pairs-"):
            assert "7/8" in picture
            assert "margin" in picture
    trouble = drawn["trouble-80x24"]
    for word in ("stalled", "4711", "more"):
        assert word in trouble


def test_no_colour_and_no_unicode_where_there_is_none(drawn):
    for name, picture in drawn.items():
        assert "\x1b" not in picture
        if "ascii" in name:
            assert picture.isascii(), name
            assert "*" in picture or "a" in picture


def test_curves_of_several_runs_differ_without_colour(tmp_path):
    runs = [watched(tmp_path / name, run_events(100, upto=n)) for name, n in (("x", 80), ("y", 50))]
    drawing = text(runs, Options(mono=True, log=True), 80, 24)
    assert drawing.count("a") > 20
    assert drawing.count("b") > 20


def test_with_colours_the_text_is_the_same(tmp_path):
    run = watched(tmp_path / "run", run_events(100, upto=80))
    coloured = text([run], Options(), 80, 24, color_system="standard")
    assert "\x1b[" in coloured
    assert Text.from_ansi(coloured).plain.split() == text([run], Options(), 80, 24).split()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 230),
    st.integers(1, 70),
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "meta", "one", "nan", "pairs", "same"]),
    st.integers(1, 3),
)
def test_every_size_gives_exactly_that_many_lines_that_fit(width, height, chart, log, ascii_only, kind, count):
    events = {
        "none": [],
        "meta": [meta(10)],
        "one": [meta(10), train(1), samples(1, "x")],
        "nan": [meta(10), *({**train(step), "loss": None} for step in range(1, 9))],
        "pairs": run_events(40, pairs=True),
        "same": [meta(10), *(train(step, loss=0.0, grad_norm=0.0) for step in range(1, 9))],
    }[kind]
    with tempfile.TemporaryDirectory() as folder:
        runs = [watched(Path(folder) / f"run{number}", events) for number in range(count)]
        lines = screen(runs, Options(chart=chart, log=log, ascii_only=ascii_only), width, height)
    assert len(lines) == height
    assert all(cell_len(line.plain) <= width for line in lines)


def test_names_with_control_characters_and_wide_letters_do_no_harm(tmp_path):
    events = [meta(10, model="\x1b[31mred\x07", method="長い" * 60), train(1)]
    events.append({"event": "warning", "step": 1, "reason": "\x1b]0;title\x07 [bold]x[/bold]", "t": 1.8e9})
    run = watched(tmp_path / "run", events)
    run.name = "wide 名前 \x1b[2J"
    picture = text([run], Options(), 80, 24)
    assert "\x1b" not in picture
    assert "\\x1b[2J" in picture
    assert "[bold]x[/bold]" in picture


def test_a_plot_puts_values_where_they_belong():
    steps = np.arange(1.0, 41.0)
    rising = [line.plain for line in plot([Curve(steps, steps, "", "line")], 50, 12, ascii_only=True)]
    assert len(rising) == 12
    assert all(len(line) == 50 for line in rising)
    where = [line.index("*") for line in rising[:-1] if "*" in line]
    assert where == sorted(where, reverse=True)
    assert rising[0].startswith("      40|")
    assert rising[-2].startswith("       1|")
    assert rising[-1].split() == ["step", "1", "20", "40"]


def test_a_log_plot_leaves_out_what_has_no_logarithm():
    steps = np.arange(4.0)
    drawn = plot([Curve(steps, np.array([-1.0, 0.0, 1.0, 100.0]))], 40, 9, ascii_only=True, log=True)
    assert drawn[0].plain.startswith("     100|")
    assert drawn[-2].plain.startswith("       1|")


def test_gaps_and_single_values_are_drawn():
    nothing = [Curve(np.arange(3.0), np.full(3, np.nan))]
    assert "nothing to plot yet" in "".join(line.plain for line in plot(nothing, 40, 5))
    assert any("*" in line.plain for line in plot([Curve(np.ones(1), np.ones(1))], 40, 5, ascii_only=True))


def test_small_pictures():
    assert sparkline(np.array([0.0, 2.0, np.nan, 7.0]), 10) == "▁▃ █"
    assert sparkline(np.arange(100.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.full(3, 5.0), 8, ascii_only=True).isascii()
    assert sparkline(np.full(3, np.nan), 8) == ""
    assert bar(0.5, 10) == "━━━━━─────"
    assert bar(7.0, 4, ascii_only=True) == "####"


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for title, content in pictures(Path(made)).items():
            (KEPT / f"{title}.txt").write_text(content, encoding="utf-8")
