"""A run as one page to keep or to send: a self-contained HTML file without a script, readable without a server.

Reads the run's folder and nothing else. Curves are `svg`'s, the picture is `picture`'s.
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from longtune.watch.charts import charts_for
from longtune.watch.runs import WatchedRun
from longtune.watch.screen import safe_lines
from longtune.watch.svg import Line, chart
from longtune.watch.view import duration, number, pace, size

POINTS = 400
SMOOTHING = 0.9
_MOST_SAMPLES = 12
_MOST_NOTES = 100


def page(run: WatchedRun) -> str:
    """The report of a run that was read (`refresh`)."""
    facts = run.facts()
    name = html.escape(run.name)
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name} - longtune report</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>",
        _headline(run, facts),
        _figures(run, facts),
        "".join(f'<p class="{alert["level"]}">{html.escape(alert["text"])}</p>' for alert in facts["alerts"]),
        f'<div class="charts">{"".join(curves(run))}</div>',
        _section("Plan and measured", _plan(run, facts)),
        _section("Data", _data(run)),
        _section("Sample answers", _samples(run)),
        _section("Checkpoints", _checkpoints(run)),
        _section("Events", _list(line for note in list(run.state.notes)[-_MOST_NOTES:] for line in safe_lines(note))),
        _section("Environment", _environment(run)),
        _section("Config", _pre(run.text("config.yaml"))),
        "</body></html>\n",
    ]
    return "".join(parts)


def curves(run: WatchedRun) -> list[str]:
    """One figure for each chart that the run has numbers for."""
    state, found = run.state, []
    for wanted in charts_for(state.has_pairs):
        weight = SMOOTHING if wanted.smoothed and len(state.train) > 20 else 0.0
        lines = []
        for index, metric in enumerate(wanted.train):
            label = metric.removesuffix("_bytes") if len(wanted.train) > 1 else "training" if wanted.validation else ""
            lines.append(Line(label, state.train.buckets(metric, POINTS), index, weight=weight))
        for metric in wanted.validation:
            lines.append(Line("validation", state.validation.buckets(metric, POINTS), 1, points=True))
        peak = run.surroundings.predicted_peak
        level = ("planned", float(peak)) if wanted.key == "memory" and peak else None
        found.append(chart(wanted.title, lines, wanted.told, unit=wanted.unit, level=level))
    return [figure for figure in found if figure]


def plan_rows(run: WatchedRun, facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, planned, measured) of everything that plan.json predicts or measured."""
    now = {key: facts[key] for key in ("peak_bytes", "seconds_per_step", "tokens_per_second")}
    predicted, measured = run.surroundings.predicted, run.surroundings.measured
    keys = [*dict.fromkeys([*predicted, *measured, *now])]
    rows = []
    for key in keys:
        values = predicted.get(key), measured.get(key, now.get(key))
        if not any(isinstance(value, dict | list) for value in values):
            rows.append((key.replace("_", " "), *(_told(key, value) for value in values)))
    return rows


def _told(key: str, value: Any) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-" if value is None else str(value)
    if key.endswith("bytes"):
        return size(int(value))
    return f"{value:,.0f}" if abs(value) >= 10_000 else number(value, 4)


def _headline(run: WatchedRun, facts: dict[str, Any]) -> str:
    meta = run.state.meta
    words = [facts["status"], facts["method"], facts["model"], facts["device"], facts["dtype"], meta.get("started")]
    written = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    told = " · ".join(html.escape(str(word)) for word in words if word)
    return f'<p class="quiet">{told} · report of {written}</p>'


def _figures(run: WatchedRun, facts: dict[str, Any]) -> str:
    best, last = facts["best_validation"], facts["validation"]
    told = [
        ("steps", f"{facts['step']:,} of {facts['steps']:,}"),
        ("loss, smoothed", number(facts["smoothed_loss"], 4) if facts["smoothed_loss"] is not None else "-"),
    ]
    if last is not None and best is not None:
        told.append(("validation at the end", number(last["loss"], 4)))
        told.append((f"best validation, step {best['step']:,}", number(best["loss"], 4)))
    if run.state.has_pairs:
        source = last if last is not None and last["accuracy"] is not None else facts
        if source["accuracy"] is not None:
            where = "validation" if source is last else "last step"
            told.append((f"accuracy, {where}", f"{source['accuracy']:.1%}"))
            told.append((f"margin, {where}", number(source["margin"], 4)))
    told += [
        ("time", duration(facts["elapsed_seconds"])),
        ("a step", pace(facts["seconds_per_step"])),
        ("peak memory", size(facts["peak_bytes"]) if facts["peak_bytes"] is not None else "-"),
    ]
    cells = "".join(f"<div><b>{html.escape(value)}</b>{html.escape(name)}</div>" for name, value in told)
    return f'<div class="figures">{cells}</div>'


def _plan(run: WatchedRun, facts: dict[str, Any]) -> str:
    plan = run.json("plan.json")
    plan = plan if isinstance(plan, dict) else {}
    settings = plan.get("plan")
    settings = settings if isinstance(settings, dict) else {}
    told = ", ".join(f"{key}: {'all' if value is None else value}" for key, value in settings.items())
    reason = f" ({plan['reason']})" if plan.get("reason") else ""
    terms = run.surroundings.predicted.get("terms")
    terms = terms if isinstance(terms, dict) else {}
    parts = [
        (name.replace("_", " "), size(int(value))) for name, value in terms.items() if isinstance(value, int | float)
    ]
    return (
        f'<p class="quiet">{html.escape(told + reason)}</p>'
        + _table(("", "planned", "measured"), plan_rows(run, facts))
        + _table(("of the planned memory", ""), parts)
    )


def _data(run: WatchedRun) -> str:
    meta = run.state.meta
    counts = [
        (name, f"{meta[key]:,}")
        for name, key in (
            ("rows", "rows"),
            ("tokens", "tokens"),
            ("trained tokens", "trained_tokens"),
            ("rows seen in the run", "seen_rows"),
            ("tokens seen in the run", "seen_tokens"),
            ("rows of validation", "valid_rows"),
            ("trainable parameters", "trainable_parameters"),
        )
        if isinstance(meta.get(key), int)
    ]
    lines = meta.get("data")
    lines = lines if isinstance(lines, list) else []
    return (_list(map(str, lines)) + _table(("", ""), counts)) if meta else ""


def _samples(run: WatchedRun) -> str:
    events = [event for event in run.state.samples if isinstance(event.get("items"), list)]
    if not events:
        return ""
    first, last = events[0], events[-1]
    before = {_text(item, "prompt"): _text(item, "answer") for item in first["items"] if isinstance(item, dict)}
    rows = []
    for item in [item for item in last["items"] if isinstance(item, dict)][:_MOST_SAMPLES]:
        prompt = _text(item, "prompt")
        cells = [prompt, _text(item, "reference")]
        cells += [before.get(prompt, "")] if last is not first else []
        rows.append([*cells, _text(item, "answer")])
    heads = ["prompt", "reference"] + ([f"step {first.get('step', 0):,}"] if last is not first else [])
    return _table([*heads, f"step {last.get('step', 0):,}"], rows, kind="samples")


def _text(item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    return value if isinstance(value, str) else "" if value is None else str(value)


def _checkpoints(run: WatchedRun) -> str:
    losses = dict(
        zip(run.state.validation.steps().tolist(), run.state.validation.column("loss").tolist(), strict=False)
    )
    saved = [note for note in run.state.notes if note["event"] == "checkpoint"]
    known = {note.get("step"): losses.get(note.get("step")) for note in saved}
    measured = {step: loss for step, loss in known.items() if loss is not None and loss == loss}
    best = min(measured, key=lambda step: measured[step]) if measured else None
    rows = []
    for note in saved:
        step, path = note.get("step"), Path(str(note.get("path")))
        loss = measured.get(step)
        there = (run.folder / "checkpoints" / path.name).is_dir()
        marks = [*(["best"] if step == best else []), *([] if there else ["removed since"])]
        rows.append((str(step), path.name, "-" if loss is None else number(loss, 4), ", ".join(marks)))
    if (run.folder / "adapter").is_dir():
        rows.append((str(run.state.step), "adapter", "", "final"))
    return _table(("step", "folder", "validation loss", ""), rows) if rows else ""


def _environment(run: WatchedRun) -> str:
    found = run.json("environment.json")
    return _pre(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()) if found else ""


def _section(title: str, content: str) -> str:
    return f"<h2>{html.escape(title)}</h2>{content}" if content else ""


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>" if text else ""


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads) if any(heads) else ""
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{body}</table></div>' if body else ""


_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2326;--quiet:#626c70;--line:#dcdfe0;--bad:#b3261e;--warn:#8a5a00;
--c0:#14697a;--c1:#c4621a;--c4:#b8336a}
@media(prefers-color-scheme:dark){:root{--back:#14181a;--text:#e4e8e9;--quiet:#97a3a8;--line:#343c40;--bad:#ff8a80;
--warn:#f0bf5e;--c0:#58c1d6;--c1:#f29b57;--c4:#f082ad}}
body{font:15px/1.45 system-ui,sans-serif;max-width:1120px;margin:0 auto;padding:1rem;
background:var(--back);color:var(--text)}
h1{font-size:1.4rem;margin:.2rem 0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
.quiet{color:var(--quiet)}.error{color:var(--bad)}.warning{color:var(--warn)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:.5rem;color:var(--quiet)}
.figures div{border:1px solid var(--line);border-radius:6px;padding:.4rem .6rem}
.figures b{display:block;color:var(--text);font-size:1.15rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(480px,100%),1fr));gap:1rem;margin:1rem 0}
figure{margin:0;break-inside:avoid}figcaption{display:flex;flex-wrap:wrap;gap:.1rem .9rem}
svg{width:100%;height:auto;display:block;font-size:11px}svg text{fill:var(--quiet)}
svg path{fill:none;stroke-width:1.8;stroke-linejoin:round}svg .thin{stroke-width:1}
svg .band{stroke-width:1.5;opacity:.3}
svg .grid{stroke:var(--line)}svg .level{stroke:var(--c4);stroke-dasharray:6 4}
path.c0{stroke:var(--c0)}path.c1{stroke:var(--c1)}circle.c1{fill:var(--c1)}
i.c0,i.c1,i.c4{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
i.c0{background:var(--c0)}i.c1{background:var(--c1)}i.c4{background:var(--c4)}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;
border-bottom:1px solid var(--line);overflow-wrap:anywhere}th{color:var(--quiet);font-weight:500}
.samples td{white-space:pre-wrap;min-width:9rem}.scroll{overflow-x:auto}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--line);border-radius:6px;padding:.6rem;
font-size:.85rem}
"""
