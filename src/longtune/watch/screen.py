"""The terminal's picture of one run or several: lines of text of a given size, a pure function of their state.

Keys, refreshing and the terminal itself belong to `terminal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from longtune.watch.charts import Chart, charts_for
from longtune.watch.plot import Curve, bar, plot, sparkline
from longtune.watch.runs import WatchedRun
from longtune.watch.series import smooth
from longtune.watch.view import duration, event_lines, number, pace, printable, size

SMOOTHINGS = (0.0, 0.6, 0.9, 0.97)
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
_STATUS = {
    "running": "bold green",
    "done": "bold cyan",
    "starting": "yellow",
    "stopped": "yellow",
    "failed": "bold red",
    "gone": "bold red",
    "silent": "bold red",
}
_KEYS = "q detach   m metric   s smoothing   l log"
_SMALLEST = (40, 12)
"""Columns and rows below which only the most necessary lines are shown."""


@dataclass(slots=True)
class Options:
    """How a person wants to see it.

    Attributes:
        chart: number of the large chart.
        smoothing: weight of the past in the smoothed curves.
        log: logarithmic vertical axis of the large chart.
        selected: number of the run that is shown where there are several and they aren't compared.
        compare: several runs in one chart.
        ascii_only: no character beyond ASCII.
        mono: no colours, so curves of several runs are told apart by letters.
    """

    chart: int = 0
    smoothing: float = 0.9
    log: bool = False
    selected: int = 0
    compare: bool = True
    ascii_only: bool = False
    mono: bool = False


def screen(runs: Sequence[WatchedRun], options: Options, width: int, height: int) -> list[Text]:
    """Draws the runs.

    Returns:
        `height` lines of at most `width` characters.
    """
    several = len(runs) > 1
    if several and options.compare:
        lines = _comparison(runs, options, width, height - 1)
    else:
        lines = _single(runs[options.selected % len(runs)], options, width, height - 1)
    keys = _KEYS + ("   n next run   c compare" if several else "")
    lines = lines[: height - 1] + [Text()] * (height - 1 - len(lines)) + [Text(keys, style="dim")]
    for line in lines:
        line.truncate(width, overflow="crop" if options.ascii_only else "ellipsis")
        line.no_wrap = True
    return lines[-height:]


def _single(run: WatchedRun, options: Options, width: int, height: int) -> list[Text]:
    head = [_title(run, width), _progress(run, options, width)]
    alerts = _alerts(run, 3 if height > 20 else 2)
    if width < _SMALLEST[0] or height < _SMALLEST[1]:
        loss = f"loss {number(run.state.train.last('loss'))}" if len(run.state.train) else "no step yet"
        return [*head, Text(loss), *alerts]
    charts = charts_for(run.state.has_pairs)
    figures = _figures(run, charts, options, width)
    events = _events(run, 2 if height < 30 else 4 if height < 44 else 7)
    room = height - len(head) - len(figures) - len(alerts) - len(events)
    main = charts[options.chart % len(charts)]
    others = [chart for chart in charts if chart is not main]
    if room < 5:
        events, room = [], room + len(events)
    if width >= 160 and room >= 24:
        area = _beside(run, main, others, options, width, room)
    elif width >= 100 and room >= 20:
        area = _below(run, main, others, options, width, room)
    else:
        area = _chart(run, main, options, width, max(room, 3), main=True)
    return [*head, *figures, *area, *alerts, *events]


def _below(run: WatchedRun, main: Chart, others: list[Chart], options: Options, width: int, height: int) -> list[Text]:
    """The large chart, and a row of small ones below it."""
    low = max(8, height * 2 // 5)
    count = min(len(others), width // 38)
    part = width // count
    small = [_chart(run, chart, options, part - 1, low) for chart in others[:count]]
    return [*_chart(run, main, options, width, height - low, main=True), *_joined(small, part)]


def _beside(run: WatchedRun, main: Chart, others: list[Chart], options: Options, width: int, height: int) -> list[Text]:
    """The large chart, and a column or two of small ones to its right."""
    left = width // 2
    across = 2 if len(others) > 3 else 1
    down = -(-len(others) // across)
    part, low = (width - left - 2) // across, height // down
    stacks = []
    for column in range(across):
        stack = []
        for chart in others[column::across]:
            stack += _chart(run, chart, options, part - 1, low)
        stacks.append(stack + [Text()] * (height - len(stack)))
    big = _chart(run, main, options, left, height, main=True)
    return [
        Text.assemble(_padded(line, left + 2), _padded(stacks[0][row], part), *(stack[row] for stack in stacks[1:]))
        for row, line in enumerate(big)
    ]


def _joined(blocks: Sequence[list[Text]], part: int) -> list[Text]:
    return [Text.assemble(*(_padded(line, part) for line in row)) for row in zip(*blocks, strict=True)]


def _padded(line: Text, width: int) -> Text:
    padded = line.copy()
    padded.truncate(width, pad=True)
    return padded


def _title(run: WatchedRun, width: int) -> Text:
    meta, status = run.state.meta, run.status
    what = ""
    if meta:
        what = printable(f"  {meta.get('method')} on {meta.get('model')}, {meta.get('device')}")
    title = Text.assemble((printable(run.name), "bold"), what)
    title.truncate(max(1, width - len(status) - 2), overflow="ellipsis", pad=True)
    return title.append(f"  {status}", _STATUS.get(status, ""))


def _progress(run: WatchedRun, options: Options, width: int) -> Text:
    state = run.state
    share = state.step / state.steps if state.steps else 0.0
    told = f" step {state.step:,}/{state.steps:,} {share:.0%}  {duration(state.elapsed)} so far"
    if run.status in ("running", "starting"):
        told += f"  ETA {duration(state.remaining)}"
    return Text.assemble((bar(share, max(4, width - len(told)), options.ascii_only), "green"), told)


def _figures(run: WatchedRun, charts: Sequence[Chart], options: Options, width: int) -> list[Text]:
    """Two figures a line, each with its curve in small."""
    part = width // 2
    cells = []
    for chart in charts:
        told = _told(run, chart)
        room = part - 15 - len(told) - 2
        values = run.state.train.buckets(chart.train[0], max(1, min(room, 24))).mean
        spark = sparkline(values, min(room, 24), options.ascii_only) if room > 4 else ""
        cells.append(Text.assemble((f"{chart.title:<15}", "dim"), (told, "bold"), "  ", (spark, "cyan")))
    best = run.state.best_validation
    if best is not None:
        told = f"{number(run.state.validation.last('loss'), 4)}, best {number(best[1], 4)} @{best[0]:,}"
        cells.insert(1, Text.assemble((f"{'validation':<15}", "dim"), (told, "bold")))
    cells = [_padded(cell, part - 1) for cell in cells]
    if len(cells) % 2:
        cells.append(Text())
    return [Text.assemble(a, " ", b) for a, b in zip(cells[::2], cells[1::2], strict=True)]


def _told(run: WatchedRun, chart: Chart) -> str:
    state = run.state
    value = state.train.last(chart.train[0])
    if value is None:
        return "nan" if len(state.train) else "-"
    told = chart.told(value)
    if chart.key == "loss" and state.smoothed_loss is not None:
        return f"{told} (smoothed {number(state.smoothed_loss, 4)})"
    pairs = state.train.last("pairs")
    if chart.key == "accuracy" and pairs:
        return f"{state.train.last('correct') or 0:.0f}/{pairs:.0f}"
    if chart.key == "memory" and run.surroundings.predicted_peak:
        return f"{told} / {size(run.surroundings.predicted_peak)} plan"
    if chart.key == "tokens_per_second":
        return f"{told} ({pace(state.seconds_per_step)} a step)"
    return told


def _chart(run: WatchedRun, chart: Chart, options: Options, width: int, height: int, main: bool = False) -> list[Text]:
    state, curves = run.state, []
    points = max(8, width - 10) * (1 if options.ascii_only else 2)
    weight = options.smoothing if chart.smoothed else 0.0
    legend = Text.assemble((chart.title, "bold"))
    for index, name in enumerate(chart.train):
        found = state.train.buckets(name, points)
        style = "cyan" if not index else "blue"
        if weight:
            curves.append(Curve(found.step, found.mean, "dim", "points"))
        curves.append(Curve(found.step, smooth(found.mean, weight), style))
    if weight and main:
        legend.append(f"  smoothed {weight:g}", "dim")
    for name in chart.validation:
        if len(state.validation) and name in state.validation.names:
            found = state.validation.buckets(name, points)
            curves.append(Curve(found.step, found.mean, "bold yellow", "points", letter="o"))
            legend.append("  o validation", "yellow")
    if chart.key == "memory":
        legend.append("  peak and active" if main else "", "dim")
        if run.surroundings.predicted_peak and len(state.train):
            level = np.full(1, float(run.surroundings.predicted_peak))
            curves.append(Curve(state.train.steps()[:1], level, "red", "level"))
            legend.append("  - planned", "red")
        curves = [Curve(c.steps, c.values / chart.unit, c.style, c.form, c.letter) for c in curves]
        legend.append(", GiB", "dim")
    log = options.log and main
    if log:
        legend.append("  log scale", "dim")
    return [legend, *plot(curves, width, height - 1, ascii_only=options.ascii_only, log=log)]


def _alerts(run: WatchedRun, most: int) -> list[Text]:
    alerts = run.alerts
    lines = [
        Text(f"! {printable(alert.text)}", style="bold red" if alert.level == "error" else "yellow")
        for alert in alerts[:most]
    ]
    if len(alerts) > most:
        lines[-1].append(f" (and {len(alerts) - most} more)")
    return lines


def _events(run: WatchedRun, most: int) -> list[Text]:
    told: list[str] = []
    for note in reversed(run.state.notes):
        if note["event"] != "resumed":
            told = [*safe_lines(note), *told]
        if len(told) >= most:
            break
    return [Text(printable(line), style="dim") for line in told[-most:]]


def safe_lines(event: dict) -> list[str]:
    """`event_lines`, or nothing where a broken or foreign event lacks what they need."""
    try:
        return event_lines(event)
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def _comparison(runs: Sequence[WatchedRun], options: Options, width: int, height: int) -> list[Text]:
    charts = charts_for(any(run.state.has_pairs for run in runs))
    chart = charts[options.chart % len(charts)]
    table = _table(runs, width)[: max(2, height - 5)]
    alerts = [
        Text(f"! {letter(index)}: {printable(alert.text)}", style="bold red" if alert.level == "error" else "yellow")
        for index, run in enumerate(runs)
        for alert in run.alerts
    ][: max(0, min(4, height - len(table) - 8))]
    curves = []
    points = max(8, width - 10) * (1 if options.ascii_only else 2)
    for index, run in enumerate(runs):
        found = run.state.train.buckets(chart.train[0], points)
        values = smooth(found.mean, options.smoothing if chart.smoothed else 0.0) / chart.unit
        mark = letter(index) if options.mono or options.ascii_only else ""
        curves.append(Curve(found.step, values, colour(index), "line", mark))
    smoothed = f", smoothed {options.smoothing:g}" if options.smoothing and chart.smoothed else ""
    unit = ", GiB" if chart.key == "memory" else ""
    legend = Text(f"{chart.title}{unit}{smoothed}{', log scale' if options.log else ''}", style="bold")
    room = max(3, height - len(table) - len(alerts) - 1)
    drawn = plot(curves, width, room, ascii_only=options.ascii_only, log=options.log)
    return [*table, legend, *drawn, *alerts]


def _table(runs: Sequence[WatchedRun], width: int) -> list[Text]:
    wide = max(8, min(40, width - 62))
    head = f"  {'run':<{wide}} {'status':<8} {'step':>9} {'loss':>7} {'valid.':>7} {'best':>7} {'tok/s':>7} {'ETA':>7}"
    lines = [Text(head, style="dim")]
    for index, run in enumerate(runs):
        state = run.state
        name = Text(printable(run.name))
        name.truncate(wide, overflow="ellipsis", pad=True)
        best = state.best_validation
        figures = (
            f"{f'{state.step}/{state.steps}':>9} {_short(state.smoothed_loss):>7} "
            f"{_short(state.validation.last('loss')):>7} {_short(best[1] if best else None):>7} "
            f"{state.train.last('tokens_per_second') or 0:>7,.0f} "
            f"{duration(state.remaining) if run.status == 'running' else '-':>7}"
        )
        status = Text(f" {run.status:<8} ", style=_STATUS.get(run.status, ""))
        lines.append(Text.assemble((letter(index) + " ", colour(index)), name, status, figures))
    return lines


def _short(value: float | None) -> str:
    return "-" if value is None else number(value, 4)


def letter(index: int) -> str:
    """A run's mark in a comparison: a, b, c, ..."""
    return chr(ord("a") + index % 26)


def colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
