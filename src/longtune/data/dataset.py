"""Sources to a data set of token trees, with everything that is wrong reported at once.

The pipeline: `sources` finds files, `readers` gives records, `formats` makes rows, `masks` and `pairs` make drafts,
`encoding` makes tokens, `trees` makes examples; `pipeline` does that for a batch of records, `passes` for all of them
on all cores, and `store` keeps the tokens on disk. Order and batches are `batching`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from longtune.data import formats
from longtune.data.fingerprint import Digest, tokens_key
from longtune.data.masks import TRAIN_ON
from longtune.data.passes import Pass
from longtune.data.pipeline import Preparer, Settings
from longtune.data.report import Report
from longtune.data.shares import Share
from longtune.data.sources import Source, Sources, resolve
from longtune.data.store import LAYOUT, Stored, Writer, open_stored
from longtune.data.trees import Example
from longtune.errors import Problem, UserError

if TYPE_CHECKING:
    from longtune.tree import Tree

OVERLONG = ("error", "drop", "truncate_left", "truncate_right", "split")
METHODS = ("sft", "dpo", "orpo", "simpo")


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
        if isinstance(self._examples, Stored):
            return self._examples.sizes.tolist()
        return [example.size for example in self._examples]


@dataclass(frozen=True)
class Dataset:
    """Examples to train on.

    Attributes:
        examples: the examples in the order of their sources; in memory, or mapped from disk.
        report: what was read, kept and dropped.
        fingerprint: sha256 (hex) over token ids, weights and settings.
        shares: how often the examples of each source come.
    """

    examples: Sequence[Example]
    report: Report
    fingerprint: str
    shares: tuple[Share, ...]

    @property
    def trees(self) -> Trees:
        """The token trees, in order."""
        return Trees(self.examples)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def branched(self) -> bool:
        """True when some example is more than one sequence: a pair, or a conversation whose history is rewritten."""
        if isinstance(self.examples, Stored):
            return self.examples.branched
        return any(len(example.pieces) > 1 for example in self.examples)


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
    cache: Path | None = None,
    workers: int | None = None,
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
        cache: a folder where the tokens are kept and mapped from, found again for the same files, tokenizer and
            settings; None keeps them in memory. Hub data is mapped from there too, but read anew each time.
        workers: processes that render and encode; 1 for none beside this one, None for one per core from four on.

    Raises:
        UserError: every problem found, the first three of each kind with their places.
    """
    settings = check_settings(
        Settings(
            method=method,
            train_on=train_on,
            max_tokens=max_tokens,
            overlong=overlong,
            template_kwargs=dict(template_kwargs or {}),
            columns=formats.parse_columns(columns),
            prompt_sharing=prompt_sharing,
            bad_rows=bad_rows,
            answer_after=answer_after,
        )
    )
    preparer = Preparer(tokenizer, settings)
    found = resolve(sources)
    reading = Pass(preparer, progress=progress, workers=workers)
    if cache is None:
        examples: list[Example] = []
        return Dataset(examples, *_read(reading, found, settings, examples.extend))
    key = tokens_key(found, tokenizer, settings, LAYOUT)
    stored = open_stored(cache / key) if key is not None else None
    if stored is None:
        with Writer(cache) as writer:
            report, fingerprint, shares = _read(reading, found, settings, writer.extend)
            meta = {"report": report.as_dict(), "fingerprint": fingerprint, "shares": [*map(asdict, shares)]}
            stored = writer.finish(meta, key)
    report = Report.from_dict(stored.meta["report"])
    if progress is not None:
        progress(report.rows)
    return Dataset(stored, report, stored.meta["fingerprint"], tuple(Share(**share) for share in stored.meta["shares"]))


def _read(
    reading: Pass, sources: Sequence[Source], settings: Settings, keep: Callable[[list[Example]], None]
) -> tuple[Report, str, tuple[Share, ...]]:
    """Report, fingerprint and shares of what was read; the examples themselves go to `keep`."""
    digest = Digest()
    shares: list[Share] = []
    emptied: list[Problem] = []
    count = 0
    for source in sources:
        first, before = count, reading.report.dropped.copy()
        for batch in reading.batches(source):
            keep(batch.examples)
            digest.update(batch.examples)
            count += len(batch.examples)
        shares.append(Share(source.place, first, count, source.weight))
        if count == first:
            emptied.append(no_rows(source.place, reading.report.dropped - before))
    reading.raise_if_any()
    report = reading.report
    if emptied:
        raise UserError(emptied)
    if settings.answer_after is not None and set(report.formats) != {"text"}:
        raise UserError(misplaced_answer_after(report))
    made_under = {
        "method": settings.method,
        "train_on": settings.train_on,
        "max_tokens": settings.max_tokens,
        "overlong": settings.overlong,
        "prompt_sharing": settings.prompt_sharing,
        "answer_after": settings.answer_after,
        "sampling": [(share.first, share.end, share.weight) for share in shares],
    }
    return report, digest.close(made_under), tuple(shares)


def no_rows(source: str, dropped: Mapping[str, int]) -> Problem:
    """The problem of a source of which nothing is left.

    Args:
        dropped: its rows that were left out, by reason.
    """
    told = "; ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    fix = "mend its rows, or take it out" if told else "fill it, or take it out"
    return Problem(source, f"no row of it is left ({told or 'it holds none'})", fix)


def misplaced_answer_after(report: Report) -> Problem:
    """The problem of `answer_after` over rows that are not text."""
    found = ", ".join(sorted(report.formats))
    return Problem("answer_after", f"is for text rows, and these are {found}", "take it out")


def check_settings(settings: Settings) -> Settings:
    """The settings; raises UserError with all that is wrong with them."""
    allowed = {
        "method": METHODS,
        "train_on": TRAIN_ON,
        "overlong": OVERLONG,
        "prompt_sharing": ("tree", "off"),
        "bad_rows": ("error", "drop"),
    }
    problems = [
        Problem(name, f"unknown value {getattr(settings, name)!r}", f"use {', '.join(values)}")
        for name, values in allowed.items()
        if getattr(settings, name) not in values
    ]
    limit, method = settings.max_tokens, settings.method
    if limit is not None and limit < 2:
        problems.append(Problem("max_tokens", f"must be at least 2, got {limit}"))
    if settings.answer_after is not None and settings.overlong == "split":
        problems.append(Problem("answer_after", "can't be with overlong: split, whose later parts have no answer"))
    if method in METHODS and method not in formats.SUPERVISED and settings.train_on != "assistant":
        problems.append(Problem("train_on", f"has no meaning under {method}, which trains both answers whole"))
    if problems:
        raise UserError(problems)
    return settings
