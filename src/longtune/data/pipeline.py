"""Records to examples, a batch at a time: the work on a row that needs no other row.

A `Preparer` can be forked into other processes, and what it makes of a batch (`Batch`) merges with what became of the
batches before. Reading, order and storing are the work of `passes`; what to make of problems is the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longtune.data import formats, trees
from longtune.data.encoding import Draft, Encoder, Sequence_
from longtune.data.masks import NOTHING, Masker
from longtune.data.pairs import pair_drafts
from longtune.data.problems import SHOWN, Problems, RowError
from longtune.data.readers import Record
from longtune.data.report import Report
from longtune.data.rows import Row
from longtune.data.template import Template
from longtune.data.trees import Example

TOO_LONG = "longer than max_tokens"
_CUT = "no trained token left after the cut"


@dataclass(frozen=True, slots=True)
class Settings:
    """What `load_dataset` was asked for; its docstring says what each means."""

    method: str = "sft"
    train_on: str = "assistant"
    max_tokens: int | None = None
    overlong: str = "error"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt_sharing: str = "tree"
    bad_rows: str = "error"
    answer_after: str | None = None


@dataclass(slots=True)
class Drafted:
    """A row with its place and drafts."""

    place: str
    row: Row
    drafts: list[Draft]


@dataclass(slots=True)
class Batch:
    """What became of some records.

    Attributes:
        examples: in the order of the records.
        report: their counts.
        problems: their problems; in the report instead where `bad_rows` is `drop`.
        formats: for each format the number of rows and the first three places.
        mapped: columns to rename that were there.
        looks: what an inspector says of each row that has examples.
    """

    examples: list[Example] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    problems: Problems = field(default_factory=Problems)
    formats: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    mapped: set[str] = field(default_factory=set)
    looks: list[Any] = field(default_factory=list)


Inspector = Callable[[Drafted, list[Sequence_], list[Example]], Any]
"""Looks at a row, its sequences before any cut, and its examples."""


class Preparer:
    """Makes examples of records.

    Args:
        tokenizer: a transformers tokenizer.
        inspector: sees every row; what it says is in `Batch.looks`.
    """

    def __init__(self, tokenizer: Any, settings: Settings, inspector: Inspector | None = None):
        self.settings = settings
        self.encoder = Encoder(tokenizer)
        self.template = Template(tokenizer, dict(settings.template_kwargs))
        self._masker = Masker(self.template, self.encoder, settings.train_on, settings.answer_after)
        self._inspector = inspector
        self._tools_seen: dict[str, bool] = {}

    def __call__(self, records: Sequence[tuple[str, Record | RowError]]) -> Batch:
        """Examples of a batch of records."""
        batch, drafted = self.draft(records)
        return self.finish(batch, drafted, self.encode(drafted))

    def draft(self, records: Sequence[tuple[str, Record | RowError]]) -> tuple[Batch, list[Drafted]]:
        """The first stage: rows and drafts."""
        batch = Batch()
        drafted: list[Drafted] = []
        for place, record in records:
            batch.report.rows += 1
            try:
                drafted.append(self._draft(batch, place, record))
            except RowError as error:
                self._bad(batch, place, error)
        return batch, drafted

    def encode(self, drafted: Sequence[Drafted]) -> list[Sequence_]:
        """The second stage: all their sequences, in the tokenizer's own threads."""
        return self.encoder.encode([draft for item in drafted for draft in item.drafts])

    def finish(self, batch: Batch, drafted: Sequence[Drafted], sequences: Sequence[Sequence_]) -> Batch:
        """The third stage: examples, cut where they are too long."""
        rest = iter(sequences)
        for item in drafted:
            own = [next(rest) for _ in item.drafts]
            try:
                examples = self._examples(batch.report, item.place, item.row, own)
            except RowError as error:
                self._bad(batch, item.place, error)
                examples = []
            batch.examples += examples
            if self._inspector is not None:
                batch.looks.append(self._inspector(item, own, examples))
        for example in batch.examples:
            self._tally(batch.report, example)
        return batch

    def _draft(self, batch: Batch, place: str, record: Record | RowError) -> Drafted:
        if isinstance(record, RowError):
            raise record
        batch.mapped |= self.settings.columns.keys() & record.keys()
        record = formats.rename(record, self.settings.columns)
        name = formats.detect(record, self.settings.method)
        count, places = batch.formats.get(name, (0, []))
        batch.formats[name] = count + 1, [*places, place][:SHOWN]
        batch.report.formats[name] += 1
        batch.report.columns.setdefault(name, list(record))
        row = formats.read_row(record, name)
        drafts = pair_drafts(row, self._masker) if row.kind == "preference" else self._masker.drafts(row)
        self._note(batch.report, row, drafts)
        return Drafted(place, row, drafts)

    def _bad(self, batch: Batch, place: str, error: RowError) -> None:
        if self.settings.bad_rows == "drop":
            batch.report.dropped[error.kind] += 1
        else:
            batch.problems.add(place, error)

    def _note(self, report: Report, row: Row, drafts: list[Draft]) -> None:
        for note in {note for draft in drafts for note in draft.notes}:
            report.notes[note] += 1
        if row.tools:
            messages = row.messages or [m for part in (row.prompt, row.answers[0]) for m in part if isinstance(m, dict)]
            key = json.dumps(row.tools, sort_keys=True)
            if messages and key not in self._tools_seen:
                self._tools_seen[key] = self.template.knows_tools(messages, row.tools, row.template_kwargs)
            if not self._tools_seen.get(key, True):
                report.notes["the chat template leaves the list of tools out"] += 1

    def _examples(self, report: Report, place: str, row: Row, sequences: list[Sequence_]) -> list[Example]:
        settings = self.settings
        pair = row.kind == "preference"
        if not _has_trained(sequences, pair):
            raise RowError(NOTHING, "no token of this row is trained", "check its answer")
        if any(sequence.merged for sequence in sequences):
            report.notes["tokens merge across the end of the prompt, so answers begin a token earlier"] += 1
        longest = max(len(sequence.ids) for sequence in sequences)
        if settings.max_tokens is not None and longest > settings.max_tokens:
            cut = self._shorten(report, row, sequences, longest, settings.max_tokens)
            if cut is None:
                return []
            if len(cut) > 1:
                return [Example.of(f"{place}[{i}]", row.weight, part) for i, part in enumerate(cut, 1)]
            sequences = cut[0]
            if not _has_trained(sequences, pair):
                report.dropped[_CUT] += 1
                return []
            report.truncated += 1
        if not pair:
            sequences = [sequence for sequence in sequences if sequence.trained]
            return [Example.of(place, row.weight, sequences, None if settings.prompt_sharing == "tree" else 0)]
        if any(np.array_equal(sequences[0].ids, other.ids) for other in sequences[1:]):
            if longest > (settings.max_tokens or longest):
                report.truncated -= 1
                report.dropped["answers equal after the cut"] += 1
                return []
            raise RowError(
                "equal answers", "chosen and rejected are equal in tokens", "nothing is preferred: take the row out"
            )
        sequences, share = trees.pair_sequences(sequences)
        return [Example.of(place, row.weight, sequences, share if settings.prompt_sharing == "tree" else 0)]

    def _shorten(
        self, report: Report, row: Row, sequences: list[Sequence_], longest: int, limit: int
    ) -> list[list[Sequence_]] | None:
        """The row cut to the limit (`split`: several), or None when it is dropped and counted."""
        overlong = self.settings.overlong
        pair = row.kind == "preference"
        if pair and min(s.spans[0].start for s in sequences) >= limit and overlong in ("error", "truncate_right"):
            if overlong == "truncate_right":
                report.dropped["prompt longer than max_tokens"] += 1
                return None
            reason = f"the prompt leaves no room for its answers, the limit is {limit:,} tokens"
            raise RowError("prompt longer than max_tokens", reason, "raise max_tokens, or set overlong: drop")
        if overlong == "drop":
            report.dropped[TOO_LONG] += 1
            return None
        if overlong == "split" and row.kind == "text":
            return [[part] for part in trees.windows(sequences[0], limit)]
        if overlong == "truncate_right":
            return [[trees.cut_right(sequence, limit) for sequence in sequences]]
        if overlong == "truncate_left":
            if not pair:
                return [[trees.cut_left(s, max(0, len(s.ids) - limit)) for s in sequences]]
            excess = longest - limit
            if excess >= min(s.spans[0].start for s in sequences):
                report.dropped["answer longer than max_tokens"] += 1
                return None
            return [[trees.cut_left(sequence, excess) for sequence in sequences]]
        fix = "raise max_tokens, or set overlong: drop, truncate_left, truncate_right"
        if overlong == "split":
            raise RowError(TOO_LONG, f"{longest:,} tokens, and only text rows can be split", fix)
        fix = f"{fix} or split" if row.kind == "text" else fix
        raise RowError(TOO_LONG, f"{longest:,} tokens, the limit is {limit:,}", fix)

    def _tally(self, report: Report, example: Example) -> None:
        report.kept += 1
        report.tokens += example.size
        report.trained += example.trained
        report.longest = max(report.longest, example.longest)
        if self.settings.method not in formats.SUPERVISED:
            begins = [next(s.start for s in q.spans if s.answer >= 0) for q in example.sequences]
            shared = example.shared
            report.sharing["not" if not shared else "fully" if shared == max(begins) else "partly"] += 1
            report.saved += sum(len(q.ids) for q in example.sequences) - example.size


def _has_trained(sequences: list[Sequence_], pair: bool) -> bool:
    return (all if pair else any)(sequence.trained for sequence in sequences)
