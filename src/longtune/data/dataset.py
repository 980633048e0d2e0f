"""Sources to a data set of token trees, with everything that is wrong reported at once.

The pipeline: `sources` finds files, `readers` gives records, `formats` makes rows, `masks` and `pairs` make drafts,
`encoding` makes tokens, `trees` makes examples. Order and batches are `batching`'s work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from longtune.data import formats, trees
from longtune.data.encoding import Draft, Encoder, Sequence_
from longtune.data.masks import NOTHING, TRAIN_ON, Masker
from longtune.data.pairs import pair_drafts
from longtune.data.problems import SHOWN, Problems, RowError
from longtune.data.readers import Record, read
from longtune.data.report import Report
from longtune.data.rows import Row
from longtune.data.sources import Source, Sources, resolve
from longtune.data.template import Template
from longtune.data.trees import Example
from longtune.errors import Problem, UserError

if TYPE_CHECKING:
    from longtune.tree import Tree

Drafted = tuple[str, Row, list[Draft]]
"""A row with its place and drafts."""

OVERLONG = ("error", "drop", "truncate_left", "truncate_right", "split")
METHODS = ("sft", "dpo", "orpo", "simpo")
_BATCH = 256
_TOO_LONG = "longer than max_tokens"
_CUT = "no trained token left after the cut"


class Trees(Sequence["Tree"]):
    """The trees of a data set, built when they are asked for."""

    def __init__(self, examples: Sequence[Example]):
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Tree: ...
    @overload
    def __getitem__(self, index: slice) -> Trees: ...
    def __getitem__(self, index: int | slice) -> Tree | Trees:
        if isinstance(index, slice):
            return Trees(self._examples[index])
        return self._examples[index].tree()

    @property
    def sizes(self) -> list[int]:
        """Tokens of each tree, without building it."""
        return [example.size for example in self._examples]


@dataclass(frozen=True)
class Dataset:
    """Examples to train on.

    Attributes:
        examples: the examples in the order of their sources.
        report: what was read, kept and dropped.
        fingerprint: sha256 (hex) over token ids, weights and settings.
        sampling: for each source, (first example, one past the last, times seen in an epoch).
    """

    examples: list[Example]
    report: Report
    fingerprint: str
    sampling: tuple[tuple[int, int, float], ...]

    @property
    def trees(self) -> Trees:
        """The token trees, in order."""
        return Trees(self.examples)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def branched(self) -> bool:
        """True when some example is more than one sequence: a pair, or a conversation whose history is rewritten."""
        return any(len(example.pieces) > 1 for example in self.examples)

    @property
    def times(self) -> list[float] | None:
        """How many times each example is seen in an epoch; None when it is once for all."""
        if all(weight == 1.0 for _, _, weight in self.sampling):
            return None
        return [weight for first, end, weight in self.sampling for _ in range(end - first)]


def load_dataset(
    sources: Sources,
    tokenizer: Any,
    *,
    method: str = "sft",
    train_on: str = "assistant",
    max_tokens: int | None = None,
    overlong: str = "error",
    template_kwargs: Mapping[str, Any] | None = None,
    columns: str | Mapping[str, str] | None = None,
    prompt_sharing: str = "tree",
    bad_rows: str = "error",
    answer_after: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Dataset:
    """Reads, checks and tokenises everything.

    Args:
        sources: a file, a folder with `train.*`, a hub name, or a list of these or of {"path", "weight"}.
        tokenizer: a transformers tokenizer; its chat template renders conversations.
        method: `sft` reads supervised rows; `dpo`, `orpo` and `simpo` read preference rows.
        train_on: `assistant` (every assistant turn), `last`, `all` (every token) or `completion`; for `sft`.
        max_tokens: the longest sequence; None for no limit.
        overlong: what becomes of longer rows: `error`, `drop`, `truncate_left`, `truncate_right`, or `split`
            (text rows only).
        template_kwargs: arguments of the chat template; a row's own `chat_template_kwargs` go over them.
        columns: `theirs=ours` pairs that rename columns.
        prompt_sharing: `tree` keeps a pair's common prompt once; `off` keeps every sequence whole.
        answer_after: for text rows: train only what follows the first place of this string, such as "\nA: ".
        bad_rows: `error`, or `drop` to leave bad rows out and count them.
        progress: called with the number of rows read so far.

    Raises:
        UserError: every problem found, the first three of each kind with their places.
    """
    _check_settings(locals())
    settings: dict[str, Any] = {
        "method": method,
        "train_on": train_on,
        "max_tokens": max_tokens,
        "overlong": overlong,
        "prompt_sharing": prompt_sharing,
        "answer_after": answer_after,
    }
    encoder = Encoder(tokenizer)
    template = Template(tokenizer, dict(template_kwargs or {}))
    loader = _Loader(
        method,
        max_tokens,
        overlong,
        prompt_sharing,
        bad_rows,
        Masker(template, encoder, train_on, answer_after),
        template,
        encoder,
    )
    names = formats.parse_columns(columns)
    examples: list[Example] = []
    sampling: list[tuple[int, int, float]] = []
    for source in resolve(sources):
        first = len(examples)
        for batch, sequences in _ahead(encoder, _batches(loader.rows(source, names), _BATCH)):
            examples += loader.examples(batch, sequences)
            if progress is not None:
                progress(loader.report.rows)
        sampling.append((first, len(examples), source.weight))
    loader.finish(examples)
    if answer_after is not None and set(loader.report.formats) != {"text"}:
        found = ", ".join(sorted(loader.report.formats))
        raise UserError(Problem("answer_after", f"is for text rows, and these are {found}", "take it out"))
    settings["sampling"] = sampling
    return Dataset(examples, loader.report, _fingerprint(examples, settings), tuple(sampling))


def _check_settings(given: Mapping[str, Any]) -> None:
    allowed = {
        "method": METHODS,
        "train_on": TRAIN_ON,
        "overlong": OVERLONG,
        "prompt_sharing": ("tree", "off"),
        "bad_rows": ("error", "drop"),
    }
    problems = [
        Problem(name, f"unknown value {given[name]!r}", f"use {', '.join(values)}")
        for name, values in allowed.items()
        if given[name] not in values
    ]
    limit = given["max_tokens"]
    if limit is not None and limit < 2:
        problems.append(Problem("max_tokens", f"must be at least 2, got {limit}"))
    if given["answer_after"] is not None and given["overlong"] == "split":
        problems.append(Problem("answer_after", "can't be with overlong: split, whose later parts have no answer"))
    if given["method"] in METHODS and given["method"] not in formats.SUPERVISED and given["train_on"] != "assistant":
        problems.append(Problem("train_on", f"has no meaning under {given['method']}, which trains both answers whole"))
    if problems:
        raise UserError(problems)


@dataclass
class _Loader:
    """The state of one `load_dataset` call."""

    method: str
    max_tokens: int | None
    overlong: str
    prompt_sharing: str
    bad_rows: str
    masker: Masker
    template: Template
    encoder: Encoder

    def __post_init__(self) -> None:
        self.report = Report()
        self.problems = Problems()
        self._tools_seen: dict[str, bool] = {}

    def rows(self, source: Source, names: Mapping[str, str]) -> Iterator[Drafted]:
        """Rows of a source with their drafts; bad ones go to the problems."""
        seen: dict[str, list[str]] = {}
        unseen = set(names)
        for place, record in read(source):
            self.report.rows += 1
            try:
                if isinstance(record, RowError):
                    raise record
                unseen -= record.keys()
                record = formats.rename(record, names)
                name = formats.detect(record, self.method)
                seen.setdefault(name, []).append(place)
                self._count(name, record)
                row = formats.read_row(record, name)
                drafts = pair_drafts(row, self.masker) if row.kind == "preference" else self.masker.drafts(row)
                self._note(row, drafts)
            except RowError as error:
                self._bad(place, error)
                continue
            yield place, row, drafts
        if unseen:
            missing = ", ".join(sorted(unseen))
            self.problems.add(source.name, RowError("unknown column", f"no row has the mapped column {missing}"))
        self._check_mixed(source, seen)

    def _check_mixed(self, source: Source, seen: dict[str, list[str]]) -> None:
        if len(seen) < 2:
            return
        if self.bad_rows == "drop":
            self.report.notes[f"{source.name} mixes formats"] += sum(map(len, seen.values()))
            return
        told = "; ".join(f"{len(places):,} of {name}, at {', '.join(places[:SHOWN])}" for name, places in seen.items())
        self.problems.add(
            source.name,
            RowError("mixed formats", f"rows of several formats: {told}", "keep one format in a source"),
        )

    def _count(self, name: str, record: Record) -> None:
        self.report.formats[name] += 1
        if name not in self.report.columns:
            self.report.columns[name] = list(record)

    def _bad(self, place: str, error: RowError) -> None:
        if self.bad_rows == "drop":
            self.report.dropped[error.kind] += 1
        else:
            self.problems.add(place, error)

    def _note(self, row: Row, drafts: list[Draft]) -> None:
        for note in {note for draft in drafts for note in draft.notes}:
            self.report.notes[note] += 1
        if row.tools:
            messages = row.messages or [m for part in (row.prompt, row.answers[0]) for m in part if isinstance(m, dict)]
            key = json.dumps(row.tools, sort_keys=True)
            if messages and key not in self._tools_seen:
                self._tools_seen[key] = self.template.knows_tools(messages, row.tools, row.template_kwargs)
            if not self._tools_seen.get(key, True):
                self.report.notes["the chat template leaves the list of tools out"] += 1

    def examples(self, batch: list[Drafted], sequences: list[Sequence_]) -> list[Example]:
        """Examples of a batch of rows, whose drafts have become the sequences."""
        rest = iter(sequences)
        found: list[Example] = []
        for place, row, drafts in batch:
            try:
                found += self._examples(place, row, [next(rest) for _ in drafts])
            except RowError as error:
                self._bad(place, error)
        return found

    def _examples(self, place: str, row: Row, sequences: list[Sequence_]) -> list[Example]:
        pair = row.kind == "preference"
        if not self._has_trained(sequences, pair):
            raise RowError(NOTHING, "no token of this row is trained", "check its answer")
        if any(sequence.merged for sequence in sequences):
            self.report.notes["tokens merge across the end of the prompt, so answers begin a token earlier"] += 1
        longest = max(len(sequence.ids) for sequence in sequences)
        if self.max_tokens is not None and longest > self.max_tokens:
            cut = self._shorten(row, sequences, longest, self.max_tokens)
            if cut is None:
                return []
            if len(cut) > 1:
                return [Example.of(f"{place}[{i}]", row.weight, part) for i, part in enumerate(cut, 1)]
            sequences = cut[0]
            if not self._has_trained(sequences, pair):
                self.report.dropped[_CUT] += 1
                return []
            self.report.truncated += 1
        if not pair:
            sequences = [sequence for sequence in sequences if sequence.trained]
            return [Example.of(place, row.weight, sequences, None if self.prompt_sharing == "tree" else 0)]
        if any(np.array_equal(sequences[0].ids, other.ids) for other in sequences[1:]):
            if longest > (self.max_tokens or longest):
                self.report.truncated -= 1
                self.report.dropped["answers equal after the cut"] += 1
                return []
            raise RowError(
                "equal answers", "chosen and rejected are equal in tokens", "nothing is preferred: take the row out"
            )
        sequences, share = trees.pair_sequences(sequences)
        return [Example.of(place, row.weight, sequences, share if self.prompt_sharing == "tree" else 0)]

    @staticmethod
    def _has_trained(sequences: list[Sequence_], pair: bool) -> bool:
        return (all if pair else any)(sequence.trained for sequence in sequences)

    def _shorten(self, row: Row, sequences: list[Sequence_], longest: int, limit: int) -> list[list[Sequence_]] | None:
        """The row cut to the limit (`split`: several), or None when it is dropped and counted."""
        pair = row.kind == "preference"
        if pair and min(s.spans[0].start for s in sequences) >= limit and self.overlong in ("error", "truncate_right"):
            if self.overlong == "truncate_right":
                self.report.dropped["prompt longer than max_tokens"] += 1
                return None
            reason = f"the prompt leaves no room for its answers, the limit is {limit:,} tokens"
            raise RowError("prompt longer than max_tokens", reason, "raise max_tokens, or set overlong: drop")
        if self.overlong == "drop":
            self.report.dropped[_TOO_LONG] += 1
            return None
        if self.overlong == "split" and row.kind == "text":
            return [[part] for part in trees.windows(sequences[0], limit)]
        if self.overlong == "truncate_right":
            return [[trees.cut_right(sequence, limit) for sequence in sequences]]
        if self.overlong == "truncate_left":
            if not pair:
                return [[trees.cut_left(s, max(0, len(s.ids) - limit)) for s in sequences]]
            excess = longest - limit
            if excess >= min(s.spans[0].start for s in sequences):
                self.report.dropped["answer longer than max_tokens"] += 1
                return None
            return [[trees.cut_left(sequence, excess) for sequence in sequences]]
        fix = "raise max_tokens, or set overlong: drop, truncate_left, truncate_right"
        if self.overlong == "split":
            raise RowError(_TOO_LONG, f"{longest:,} tokens, and only text rows can be split", fix)
        raise RowError(_TOO_LONG, f"{longest:,} tokens, the limit is {limit:,}", f"{fix} or split (text rows)")

    def finish(self, examples: list[Example]) -> None:
        """Raises all problems, or fills in the report."""
        self.problems.raise_if_any()
        report = self.report
        if not examples:
            told = "; ".join(f"{count} {reason}" for reason, count in report.dropped.items())
            raise UserError(Problem("data", f"no row is left to train on ({told or 'no rows'})"))
        report.kept = len(examples)
        for example in examples:
            report.tokens += example.size
            report.trained += example.trained
            report.longest = max(report.longest, example.longest)
            if self.method not in formats.SUPERVISED:
                begins = [next(s.start for s in q.spans if s.answer >= 0) for q in example.sequences]
                shared = example.shared
                report.sharing["not" if not shared else "fully" if shared == max(begins) else "partly"] += 1
                report.saved += sum(len(q.ids) for q in example.sequences) - example.size


def _ahead(encoder: Encoder, batches: Iterator[list[Drafted]]) -> Iterator[tuple[list[Drafted], list[Sequence_]]]:
    """Batches with their sequences; one batch is encoded (in the tokenizer's threads) while the next is rendered."""
    with ThreadPoolExecutor(1) as pool:
        before: tuple[list[Drafted], Future[list[Sequence_]]] | None = None
        for batch in batches:
            encoding = pool.submit(encoder.encode, [draft for _, _, drafts in batch for draft in drafts])
            if before is not None:
                yield before[0], before[1].result()
            before = batch, encoding
        if before is not None:
            yield before[0], before[1].result()


def _batches(items: Iterator[Drafted], size: int) -> Iterator[list[Drafted]]:
    batch: list[Drafted] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _fingerprint(examples: list[Example], settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for example in examples:
        layout = [(p.parent, p.sequence, p.start, p.end) for p in example.pieces]
        digest.update(repr((example.weight, layout)).encode())
        for sequence in example.sequences:
            digest.update(repr([(s.start, s.end, s.weight, s.answer) for s in sequence.spans]).encode())
            digest.update(sequence.ids.tobytes())
    return digest.hexdigest()
