"""One pass over sources: reads records, has them prepared on all cores, and hands the batches on in order.

Small sources stay in this process, where one batch is rendered while the one before is encoded in the tokenizer's
threads. After the first batches a pool of forked processes takes over, where the system has forks and cores to spare.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice

from longtune.data.pipeline import Batch, Drafted, Preparer
from longtune.data.problems import SHOWN, Problems, RowError
from longtune.data.readers import Record, read
from longtune.data.report import Report
from longtune.data.sources import Source
from longtune.errors import Problem, UserError

Records = list[tuple[str, Record | RowError]]

BATCH = 256
"""Records that are prepared together."""
ALONE = 16
"""Batches after which a pool of processes pays."""


class Pass:
    """Reads sources one after the other, and gathers what is wrong with them.

    Args:
        progress: called with the number of rows read so far.
        workers: processes; 1 for none beside this one. None for one per core where there are at least four: of two
            or three this process and the tokenizer's threads make full use already.

    Attributes:
        report: counts of all sources so far.
        problems: of the rows.
        unreadable: of whole sources.
    """

    def __init__(
        self, preparer: Preparer, *, progress: Callable[[int], None] | None = None, workers: int | None = None
    ):
        self._preparer = preparer
        self._progress = progress
        self._workers = _cores() if workers is None else workers
        self.report = Report()
        self.problems = Problems()
        self.unreadable: list[Problem] = []

    def batches(self, source: Source) -> Iterator[Batch]:
        """What became of the source's records; problems are gathered, never raised."""
        seen: dict[str, tuple[int, list[str]]] = {}
        unmapped = set(self._preparer.settings.columns)
        for batch in _in_order(self._preparer, _cut(self._readable(source), BATCH), self._workers):
            self.report.merge(batch.report)
            self.problems.merge(batch.problems)
            unmapped -= batch.mapped
            for name, (count, places) in batch.formats.items():
                before, first = seen.get(name, (0, []))
                seen[name] = before + count, [*first, *places][:SHOWN]
            if self._progress is not None:
                self._progress(self.report.rows)
            yield batch
        if unmapped and not self.unreadable:
            missing = ", ".join(sorted(unmapped))
            self.problems.add(source.name, RowError("unknown column", f"no row has the mapped column {missing}"))
        self._check_mixed(source, seen)

    def _readable(self, source: Source) -> Iterator[tuple[str, Record | RowError]]:
        """The records up to where the source can't be read."""
        try:
            yield from read(source)
        except UserError as error:
            self.unreadable += error.problems

    def _check_mixed(self, source: Source, seen: Mapping[str, tuple[int, list[str]]]) -> None:
        if len(seen) < 2:
            return
        if self._preparer.settings.bad_rows == "drop":
            self.report.notes[f"{source.name} mixes formats"] += sum(count for count, _ in seen.values())
            return
        told = "; ".join(f"{count:,} of {name}, at {', '.join(places)}" for name, (count, places) in seen.items())
        self.problems.add(
            source.name,
            RowError("mixed formats", f"rows of several formats: {told}", "keep one format in a source"),
        )

    def raise_if_any(self) -> None:
        """Raises `UserError` with everything that is wrong."""
        if problems := self.unreadable + self.problems.listed():
            raise UserError(problems)


def _cut(records: Iterator[tuple[str, Record | RowError]], size: int) -> Iterator[Records]:
    while batch := list(islice(records, size)):
        yield batch


def _in_order(preparer: Preparer, batches: Iterator[Records], workers: int) -> Iterator[Batch]:
    if workers < 2 or sys.platform != "linux":
        yield from _here(preparer, batches)
        return
    yield from _here(preparer, islice(batches, ALONE))
    rest = list(islice(batches, 1))
    if rest:
        yield from _forked(preparer, chain(rest, batches), workers)


def _here(preparer: Preparer, batches: Iterator[Records]) -> Iterator[Batch]:
    """Prepared in this process: one batch is encoded while the next is rendered."""
    with ThreadPoolExecutor(1) as pool:
        before: tuple[Batch, list[Drafted], Future] | None = None
        for records in batches:
            batch, drafted = preparer.draft(records)
            encoding = pool.submit(preparer.encode, drafted)
            if before is not None:
                yield preparer.finish(before[0], before[1], before[2].result())
            before = batch, drafted, encoding
        if before is not None:
            yield preparer.finish(before[0], before[1], before[2].result())


def _forked(preparer: Preparer, batches: Iterator[Records], workers: int) -> Iterator[Batch]:
    """Prepared by forked processes, a bounded number of batches ahead, in order.

    Forks, as a fresh interpreter would import torch and transformers first, and a user's script without a `__main__`
    guard would run again. They touch no device, and their tokenizers use no threads.
    """
    context = multiprocessing.get_context("fork")
    waiting: deque[Future[Batch]] = deque()
    with ProcessPoolExecutor(workers, context, _begin, (preparer,)) as pool:
        try:
            with _quiet_forks():
                waiting.extend(pool.submit(_prepare, records) for records in islice(batches, 1))
            waiting.extend(pool.submit(_prepare, records) for records in islice(batches, 2 * workers))
            while waiting:
                batch = waiting.popleft().result()
                waiting.extend(pool.submit(_prepare, records) for records in islice(batches, 1))
                yield batch
        except BrokenProcessPool:
            fix = "was there memory enough? LONGTUNE_WORKERS=1 reads in one process"
            raise UserError(Problem("data", "a process that prepares rows was killed", fix)) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _quiet_forks() -> Iterator[None]:
    """The tokenizer's threads don't outlive a fork; told so beforehand, the children use none and say nothing."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with warnings.catch_warnings():
            # Python warns of forks beside threads; the children call nothing that another thread may have locked.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


_preparer: Preparer | None = None
"""In a forked process: its preparer."""


def _begin(preparer: Preparer) -> None:
    global _preparer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _preparer = preparer


def _prepare(records: Sequence[tuple[str, Record | RowError]]) -> Batch:
    assert _preparer is not None
    return _preparer(records)


def _cores() -> int:
    """Processes to use: $LONGTUNE_WORKERS, else the cores that this process may use, at most 16; 1 below 4 cores."""
    given = os.environ.get("LONGTUNE_WORKERS", "")
    if given.isdigit():
        return max(1, int(given))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16) if cores >= 4 else 1
