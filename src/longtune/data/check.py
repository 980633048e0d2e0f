"""Everything about data that is worth knowing before a run: what `longtune check` prints.

Reads the rows exactly as a run would, with the same settings, and keeps a few numbers of each; what a single row is
looked at for is `inspect`'s work, how it is shown the command line's.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from longtune.data.batching import Batcher
from longtune.data.dataset import check_settings, misplaced_answer_after, no_rows
from longtune.data.inspect import FIXES, Inspector, Look
from longtune.data.passes import Pass
from longtune.data.pipeline import Preparer, Settings
from longtune.data.places import Places
from longtune.data.problems import SHOWN
from longtune.data.progress import reading_bar
from longtune.data.report import UNTRAINED, Report
from longtune.data.run_length import RunLength
from longtune.data.shares import Share
from longtune.data.sources import resolve
from longtune.data.trees import Example
from longtune.errors import Problem, UserError

DUPLICATE = "duplicate row"
LEAK = "row of train in valid"
PAST_POSITIONS = "beyond the model's positions"
PERCENTILES = (50, 90, 99)
_LIMITS = tuple(512 * 2**k for k in range(18))


@dataclass(frozen=True, slots=True)
class Finding:
    """Problems of one kind.

    Attributes:
        level: error (a run would stop before its first step) or warning.
        kind: short name.
        count: how many rows have it; 0 where it is no matter of single rows.
        problems: the first three, with their places.
    """

    level: str
    kind: str
    count: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of a shown row as text; `trained` says whether they are targets, `special` that they are one
    special token."""

    text: str
    tokens: int
    trained: bool
    special: bool = False


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row to show: the runs of each of its sequences (of a pair: chosen first)."""

    place: str
    sequences: tuple[tuple[Run, ...], ...]
    pair: bool


@dataclass(slots=True)
class SplitCheck:
    """What was found in the training or the validation rows.

    Attributes:
        name: train or valid.
        source: where the rows come from, as it was given.
        report: as a run's.
        findings: errors first.
        lengths: for prompt, answer, rejected and whole: min, p50, p90, p99, max and mean, in tokens.
        over: for each usual limit below the longest row, how many rows are longer.
        limit: {max_tokens, overlong, rows, tokens}: rows over the run's own limit, and their tokens beyond it.
        template: {rows, added, share}: rows looked at, and the mean number and share of tokens from the template.
        shown: the first rows.
        sizes: tokens of each example, int64.
        shares: as `Dataset.shares`.
    """

    name: str
    source: str
    report: Report = field(default_factory=Report)
    findings: list[Finding] = field(default_factory=list)
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)
    over: dict[int, int] = field(default_factory=dict)
    limit: dict[str, Any] = field(default_factory=dict)
    template: dict[str, float] = field(default_factory=dict)
    shown: list[ShownRow] = field(default_factory=list)
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    shares: tuple[Share, ...] = ()
    _digests: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    _places: Places = field(default_factory=Places)

    @property
    def trees(self) -> Sequence[Any]:
        """Stands for the trees in a `Batcher`, with their sizes alone."""
        return _Sized(self.sizes)

    def sort(self) -> None:
        """Brings the errors before the warnings."""
        self.findings.sort(key=lambda finding: finding.level != "error")

    def add_run(self, problems: Sequence[Problem], notes: Sequence[str]) -> None:
        """Takes up what a run over these rows would refuse, and what it would warn of."""
        self.findings += [Finding("error", "a run would not start", 0, (problem,)) for problem in problems]
        self.findings += [Finding("warning", "not seen", 0, (Problem(self.name, note),)) for note in notes]
        self.sort()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": self.source,
            **self.report.as_dict(),
            "findings": [
                {
                    "level": finding.level,
                    "kind": finding.kind,
                    "count": finding.count,
                    "first": [{"place": p.place, "reason": p.reason, "fix": p.fix} for p in finding.problems],
                }
                for finding in self.findings
            ],
            "lengths": self.lengths,
            "over": {str(limit): count for limit, count in self.over.items()},
            "limit": self.limit,
            "template": self.template,
            "shown": [
                {
                    "place": row.place,
                    "sequences": [
                        [{"text": run.text, "tokens": run.tokens, "trained": run.trained} for run in sequence]
                        for sequence in row.sequences
                    ],
                }
                for row in self.shown
            ],
        }


def check_data(
    sources: Mapping[str, Any],
    tokenizer: Any,
    settings: Settings,
    *,
    show: int = 0,
    workers: int | None = None,
    positions: int | None = None,
) -> list[SplitCheck]:
    """Checks all splits, and that none of the later ones' rows are in the first.

    Args:
        sources: by name ("train", "valid"), as `load_dataset` takes them.
        show: so many rows of each split are kept to be shown.
        positions: those that the model was made for, in tokens; None where that isn't known.

    Raises:
        UserError: the settings make no sense. What is wrong with the data is in the findings.
    """
    check_settings(settings)
    splits = [
        _check_split(name, source, tokenizer, settings, show, workers, positions) for name, source in sources.items()
    ]
    for split in splits[1:]:
        split.findings += _leaks(splits[0], split)
    for split in splits:
        split.sort()
    return splits


def _check_split(
    name: str,
    source: Any,
    tokenizer: Any,
    settings: Settings,
    show: int,
    workers: int | None,
    positions: int | None,
) -> SplitCheck:
    split = SplitCheck(name, source if isinstance(source, str) else ", ".join(map(_source_name, source)))
    try:
        found = resolve(source)
    except UserError as error:
        split.findings.append(Finding("error", "unreadable", len(error.problems), error.problems))
        return split
    # Bad rows are named even where the run would leave them out.
    strict = Settings(**{**_fields(settings), "bad_rows": "error"})
    gathered = _Gathered()
    shares: list[Share] = []
    emptied: list[Problem] = []
    with reading_bar(source) as progress:
        reading = Pass(Preparer(tokenizer, strict, Inspector(tokenizer)), progress=progress, workers=workers)
        for part in found:
            first, before = len(gathered.sizes), reading.report.dropped + Counter(reading.problems.counts)
            for batch in reading.batches(part):
                gathered.add(batch.looks, batch.examples)
                split.shown += [_shown(e, tokenizer) for e in batch.examples[: show - len(split.shown)]]
            shares.append(Share(part.place, first, len(gathered.sizes), part.weight))
            if not shares[-1].rows:
                bad = reading.report.dropped + Counter(reading.problems.counts) - before
                emptied.append(no_rows(part.place, bad))
    split.report, split.shares = reading.report, tuple(shares)
    _find(split, reading, settings, emptied)
    gathered.fill(split, settings, positions)
    return split


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.__dataclass_fields__}


def _source_name(entry: Any) -> str:
    return str(entry["path"]) if isinstance(entry, Mapping) and "path" in entry else str(entry)


def _find(split: SplitCheck, reading: Pass, settings: Settings, emptied: Sequence[Problem]) -> None:
    """The findings that a run would make, too."""
    level = "warning" if settings.bad_rows == "drop" else "error"
    counts = reading.problems.counts
    for problem in reading.unreadable:
        split.findings.append(Finding("error", "unreadable", 1, (problem,)))
    for kind, shown in reading.problems.shown.items():
        fatal = "error" if kind == "unknown column" else level
        split.findings.append(Finding(fatal, kind, counts[kind], tuple(shown)))
    report = split.report
    if settings.answer_after is not None and report.formats and set(report.formats) != {"text"}:
        split.findings.append(Finding("error", "answer_after", report.rows, (misplaced_answer_after(report),)))
    if emptied and not any(finding.level == "error" for finding in split.findings):
        split.findings.append(Finding("error", "no rows", 0, tuple(emptied)))


class _Gathered:
    """A few numbers of every row of a split."""

    def __init__(self) -> None:
        self.sizes = array("q")
        self._columns = {name: array("q") for name in ("prompt", "answer", "rejected", "whole")}
        self._digests = array("Q")
        self._places = Places()
        self._added: list[tuple[int, int]] = []
        self._findings: dict[str, tuple[int, list[Problem]]] = {}

    def add(self, looks: Sequence[Look], examples: Sequence[Example]) -> None:
        self.sizes.extend(example.size for example in examples)
        for look in looks:
            for name, column in self._columns.items():
                column.append(getattr(look, name))
            self._digests.append(look.digest)
            self._places.append(look.place)
            if look.added >= 0:
                self._added.append((look.added, look.whole))
            for kind, reason in look.findings:
                count, shown = self._findings.get(kind, (0, []))
                if len(shown) < SHOWN:
                    shown.append(Problem(look.place, reason, FIXES[kind]))
                self._findings[kind] = count + 1, shown

    def fill(self, split: SplitCheck, settings: Settings, positions: int | None) -> None:
        """Fills in what the numbers of all rows say."""
        columns = {name: np.frombuffer(column, dtype=np.int64) for name, column in self._columns.items() if column}
        split.sizes = np.array(self.sizes, dtype=np.int64)
        split._digests, split._places = np.array(self._digests, dtype=np.uint64), self._places
        for name, values in columns.items():
            if (known := values[values >= 0]).size:
                split.lengths[name] = _percentiles(known)
        whole = columns.get("whole", split.sizes[:0])
        split.over = {limit: n for limit in _LIMITS if (n := int((whole > limit).sum()))}
        limit = settings.max_tokens
        beyond = np.maximum(whole - limit, 0) if limit is not None else whole * 0
        split.limit = {
            "max_tokens": limit,
            "overlong": settings.overlong,
            "rows": int((beyond > 0).sum()),
            "tokens": int(beyond.sum()),
        }
        if self._added:
            added, tokens = map(sum, zip(*self._added, strict=True))
            rows = len(self._added)
            split.template = {"rows": rows, "added": added / rows, "share": added / max(1, tokens)}
        for kind, (count, shown) in self._findings.items():
            split.findings.append(Finding("warning", kind, count, tuple(shown)))
        split.findings += _duplicates(split)
        if positions is not None:
            kept = (beyond == 0) | (settings.overlong not in ("error", "drop"))
            split.findings += _past_positions(split, np.where(kept, whole - beyond, 0), positions)


def _past_positions(split: SplitCheck, tokens: np.ndarray, positions: int) -> list[Finding]:
    """Rows that a run would train with more tokens than the model was made for."""
    rows = np.flatnonzero(tokens > positions)
    problems = [
        Problem(
            split._places[int(row)],
            f"{tokens[row]:,} tokens, and the model was made for {positions:,}: {UNTRAINED}",
            f"set train.max_tokens to {positions} and train.overlong to drop or truncate_right",
        )
        for row in rows[:SHOWN]
    ]
    return [Finding("warning", PAST_POSITIONS, len(rows), tuple(problems))] if problems else []


def _percentiles(values: np.ndarray) -> dict[str, float]:
    figures = {"min": float(values.min())}
    for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES, method="higher"), strict=True):
        figures[f"p{percent}"] = float(value)
    return {**figures, "max": float(values.max()), "mean": float(values.mean())}


def _duplicates(split: SplitCheck) -> list[Finding]:
    """Rows whose tokens are those of an earlier row."""
    digests = split._digests
    order = np.argsort(digests, kind="stable")
    same = np.flatnonzero(digests[order[1:]] == digests[order[:-1]]) + 1
    if not same.size:
        return []
    again = np.sort(order[same])
    firsts = {}
    for row in again[:SHOWN]:
        firsts[int(row)] = int(np.flatnonzero(digests == digests[row])[0])
    fix = "take it out, unless it is meant to count twice"
    problems = [
        Problem(split._places[row], f"the same tokens as {split._places[first]}", fix) for row, first in firsts.items()
    ]
    return [Finding("warning", DUPLICATE, len(again), tuple(problems))]


def _leaks(train: SplitCheck, other: SplitCheck) -> list[Finding]:
    """Rows of another split that are in the training rows, too."""
    again = np.flatnonzero(np.isin(other._digests, train._digests))
    problems = []
    for row in again[:SHOWN]:
        first = int(np.flatnonzero(train._digests == other._digests[row])[0])
        reason = f"the same tokens as {train._places[first]}"
        problems.append(Problem(other._places[int(row)], reason, "validation is too good with rows that were trained"))
    return [Finding("warning", LEAK, len(again), tuple(problems))] if problems else []


def _shown(example: Example, tokenizer: Any) -> ShownRow:
    runs = tuple(_runs(sequence.ids, sequence.spans, tokenizer) for sequence in example.sequences)
    pair = any(span.answer > 0 for sequence in example.sequences for span in sequence.spans)
    return ShownRow(example.place, runs, pair)


def _runs(ids: np.ndarray, spans: Sequence[Any], tokenizer: Any) -> tuple[Run, ...]:
    """The tokens as text, cut where trained and untrained ones meet, and at special tokens."""
    trained = np.zeros(len(ids), dtype=bool)
    for span in spans:
        if span.answer >= 0 and span.weight > 0:
            trained[max(span.start, 1) : span.end] = True
    special = np.isin(ids, tokenizer.all_special_ids)
    cuts = (trained[1:] != trained[:-1]) | special[1:] | special[:-1]
    edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(ids)]
    return tuple(
        Run(tokenizer.decode(ids[start:end].tolist()), end - start, bool(trained[start]), bool(special[start]))
        for start, end in pairwise(edges)
        if end > start
    )


class _Sized(Sequence[Any]):
    """Stands for trees of which only the sizes are known."""

    def __init__(self, sizes: np.ndarray):
        self.sizes = sizes.tolist()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


def estimate(batches: Batcher, length: RunLength) -> dict[str, float]:
    """What a run comes to.

    Returns:
        {steps, micro_batches, epochs, rows, tokens, tokens_per_step, largest_batch}.
    """
    sizes = batches.sizes
    return {
        "steps": length.steps,
        "micro_batches": length.micro_batches,
        "epochs": length.epochs,
        "rows": sum(length.rows),
        "tokens": length.tokens,
        "tokens_per_step": round(length.tokens / max(1, length.steps)),
        "largest_batch": sum(sizes[row] for row in batches.largest()),
    }


def has_errors(splits: Sequence[SplitCheck]) -> bool:
    """True when a run over these would stop before its first step."""
    return any(finding.level == "error" for split in splits for finding in split.findings)
