"""How the findings of `longtune check` look: lines for the terminal, with trained tokens in colour, and an HTML page.

Finds nothing itself: everything shown is in the `SplitCheck`s.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from longtune.data.check import Finding, Run, ShownRow, SplitCheck
from longtune.errors import counted

_FIGURES = ("min", "p50", "p90", "p99", "max", "mean")
_SIDES = ("chosen", "rejected")
_MOST = 400
"""Characters of one run of tokens on a terminal; what is longer is cut in the middle."""


def show(splits: Sequence[SplitCheck], estimate: Mapping[str, float], config: Any, sources: Sequence[str]) -> None:
    """Prints everything.

    Args:
        config: the run's config; its settings of the run are named beside the estimate.
        sources: what the run sees of each source.
    """
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for split in splits:
        console.print(Text(f"{split.name}  {split.source}", style="bold"))
        for line in _lines(split):
            console.print(Text(f"  {line}"))
        for finding in split.findings:
            style = "bold red" if finding.level == "error" else "yellow"
            console.print(Text(f"  {_headline(finding)}", style=style))
            for problem in finding.problems:
                console.print(Text(f"    {problem.place}: {problem.reason}"))
            if fix := next((problem.fix for problem in finding.problems if problem.fix), ""):
                console.print(Text(f"    fix: {fix}"))
    if estimate:
        console.print(Text(estimate_line(estimate, config)))
        for line in sources:
            console.print(Text(f"  {line}"))
    for split in splits:
        for row in split.shown:
            _show_row(console, row)
    counts = [sum(f.level == level for split in splits for f in split.findings) for level in ("error", "warning")]
    told = " and ".join(f"{count} kind{'s' if count != 1 else ''} of {level}s" for count, level in _told(counts))
    console.print(Text(told or "nothing wrong was found", style="bold red" if counts[0] else "bold"))


def _headline(finding: Finding) -> str:
    rows = f", {counted(finding.count, 'row')}" if finding.count else ""
    return f"{finding.level}: {finding.kind}{rows}"


def _told(counts: list[int]) -> list[tuple[int, str]]:
    return [(count, level) for count, level in zip(counts, ("error", "warning"), strict=True) if count]


def _lines(split: SplitCheck) -> list[str]:
    report = split.report
    if not report.rows:
        return []
    lines = report.lines()
    if split.lengths:
        lines.append(f"{'tokens':<10}" + "".join(f"{figure:>9}" for figure in _FIGURES))
        for name, figures in split.lengths.items():
            lines.append(f"{name:<10}" + "".join(f"{figures[figure]:>9,.0f}" for figure in _FIGURES))
    if report.tokens:
        lines.append(f"trained: {report.trained / report.tokens:.0%} of the tokens")
    if split.template:
        added, share = split.template["added"], split.template["share"]
        lines.append(f"the template adds {added:.0f} tokens to a row ({share:.0%} of it)")
    limit = split.limit.get("max_tokens")
    if limit is not None:
        rows, tokens = split.limit["rows"], split.limit["tokens"]
        told = f"{rows:,} rows, {tokens:,} tokens beyond it (overlong: {split.limit['overlong']})" if rows else "no row"
        lines.append(f"over max_tokens {limit:,}: {told}")
    if split.over:
        lines.append("longer than " + ", ".join(f"{at:,}: {count:,}" for at, count in split.over.items()))
    return lines


def estimate_line(estimate: Mapping[str, float], config: Any) -> str:
    """What the run comes to, in a line."""
    train = config.train
    batch = f"{train.tokens_per_batch:,} tokens" if train.tokens_per_batch else f"batch_size {train.batch_size}"
    steps = counted(round(estimate["steps"]), "step")
    return (
        f"a run: {steps} of {estimate['tokens_per_step']:,} tokens ({batch}, accumulate {train.accumulate}), "
        f"{counted(float(estimate['epochs']), 'epoch')}, {estimate['tokens']:,} tokens; "
        f"largest micro-batch {estimate['largest_batch']:,}"
    )


def _show_row(console: Console, row: ShownRow) -> None:
    coloured = console.is_terminal and not console.no_color
    for number, sequence in enumerate(row.sequences):
        side = f", {_side(number)}" if row.pair else ""
        tokens, trained = (sum(r.tokens for r in sequence if wanted(r)) for wanted in (lambda _: True, _is_trained))
        marks = "" if coloured else ", between [[ and ]]"
        console.print(Text(f"{row.place}{side}: {tokens:,} tokens, {trained:,} trained{marks}", style="bold"))
        text = Text("  ")
        for run in sequence:
            shown = _visible(_shortened(run.text)).replace("\n", "\n  ")
            if coloured:
                text.append(shown, style="bold green" if run.trained else "cyan" if run.special else "dim")
            else:
                text.append(f"[[{shown}]]" if run.trained else shown)
        if not coloured:
            text = Text(text.plain.replace("]][[", ""))
        console.print(text)


def _is_trained(run: Run) -> bool:
    return run.trained


def _side(number: int) -> str:
    return _SIDES[min(number, 1)] + (f" {number}" if number > 1 else "")


def _shortened(text: str) -> str:
    if len(text) <= _MOST:
        return text
    return f"{text[: _MOST // 2]} [... {len(text) - _MOST:,} characters ...] {text[-_MOST // 2 :]}"


def _visible(text: str) -> str:
    """Control characters of the data must not steer the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() or c == "\u200d" else f"\\x{ord(c):02x}" for c in text)


def page(splits: Sequence[SplitCheck], estimate: Mapping[str, float], model: str) -> str:
    """A self-contained page: no script, nothing loaded from elsewhere."""
    parts = [_HEAD, f"<h1>longtune check</h1><p>Tokenizer and template: {html.escape(model)}</p>"]
    for split in splits:
        parts.append(f"<h2>{html.escape(split.name)}</h2><p>{html.escape(split.source)}</p><ul>")
        parts += [f"<li>{html.escape(line)}</li>" for line in split.report.lines()]
        parts.append("</ul>")
        if split.lengths:
            head = "".join(f"<th>{figure}</th>" for figure in _FIGURES)
            parts.append(f"<table><tr><th>tokens</th>{head}</tr>")
            for name, figures in split.lengths.items():
                cells = "".join(f"<td>{figures[figure]:,.0f}</td>" for figure in _FIGURES)
                parts.append(f"<tr><th>{name}</th>{cells}</tr>")
            parts.append("</table>")
        for finding in split.findings:
            parts.append(f'<p class="{finding.level}">{html.escape(_headline(finding))}</p><ul>')
            parts += [f"<li>{html.escape(str(problem))}</li>" for problem in finding.problems]
            parts.append("</ul>")
        parts += [_row_html(row) for row in split.shown]
    if estimate:
        parts.append(f"<p>Estimate: {estimate['steps']:,} steps, {estimate['tokens']:,} tokens.</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _row_html(row: ShownRow) -> str:
    parts = []
    for number, sequence in enumerate(row.sequences):
        side = f" ({_side(number)})" if row.pair else ""
        parts.append(f"<h3>{html.escape(row.place)}{side}</h3><pre>")
        for run in sequence:
            kind = " ".join(name for name in ("trained", "special") if getattr(run, name)) or "plain"
            title = f"{run.tokens} tokens{', trained' if run.trained else ''}"
            parts.append(f'<span class="{kind}" title="{title}">{html.escape(run.text)}</span>')
        parts.append("</pre>")
    return "".join(parts)


_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>longtune check</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .75rem; border: 1px solid #8886; border-radius: .4rem; }
.plain { opacity: .65; } .trained { background: #2da44e44; } .special { color: #8250df; font-weight: bold; }
.error { color: #d1242f; font-weight: bold; } .warning { color: #9a6700; font-weight: bold; }
table { border-collapse: collapse; } td, th { text-align: right; padding: .1rem .7rem; }
</style></head><body>
<p><span class="trained">trained</span> <span class="plain">not trained</span>
<span class="special">special token</span></p>"""
