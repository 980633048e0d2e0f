"""Examples on disk, memory-mapped: data sets that are larger than memory, and that are tokenised only once.

A folder holds flat arrays (token ids; where each sequence, its spans and each example begin) and `meta.json`, which is
written last. It is built under another name and renamed, so it is whole or not there; of two processes that build it
at once the first to rename wins. Which folder belongs to which data is `fingerprint`'s work.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from longtune.data.encoding import Sequence_, Span
from longtune.data.places import Places, join
from longtune.data.trees import Example
from longtune.errors import Problem, UserError

LAYOUT = 1
"""Counts up when what a folder holds changes."""

_BUILDING = ".building-"

_IDS = np.dtype("<i4")
_SPANS = np.dtype([("start", "<i8"), ("end", "<i8"), ("weight", "<f8"), ("answer", "<i4")])
_SEQUENCES = np.dtype([("token", "<i8"), ("span", "<i8")])
_EXAMPLES = np.dtype(
    [
        ("sequence", "<i8"),
        ("share", "<i8"),
        ("size", "<i8"),
        ("pieces", "<i4"),
        ("weight", "<f8"),
        ("prefix", "<i4"),
        ("number", "<i8"),
        ("part", "<i4"),
    ]
)
_UNUSED = 30 * 86400.0
_ABANDONED = 86400.0
"""Seconds after which a folder that no run has opened, and one that nobody builds any more, is deleted."""

_ARRAYS = {"ids": _IDS, "spans": _SPANS, "sequences": _SEQUENCES, "examples": _EXAMPLES}


class Stored(Sequence[Example]):
    """Examples of a folder, made when they are asked for.

    Args:
        folder: what a `Writer` has finished.

    Raises:
        ValueError: the folder is not whole, or of another layout.
    """

    def __init__(self, folder: Path):
        try:
            self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
            if self.meta.get("layout") != LAYOUT:
                raise ValueError("it has another layout")
            arrays = {name: _map(folder, name, self.meta["counts"][name]) for name in _ARRAYS}
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(f"it is not whole: {error!r}") from error
        self._ids, self._spans = arrays["ids"], arrays["spans"]
        # One more at the end: where the last one stops.
        self._sequences, self._examples = arrays["sequences"], arrays["examples"]
        self._prefixes: list[str] = self.meta["prefixes"]

    def __len__(self) -> int:
        return len(self._examples) - 1

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        row, after = self._examples[index], self._examples[index + 1]
        sequences = [self._sequence(i) for i in range(int(row["sequence"]), int(after["sequence"]))]
        return Example.of(self._place(row), float(row["weight"]), sequences, int(row["share"]))

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each example's tree, int64 [examples]."""
        return self._examples["size"][:-1]

    @property
    def branched(self) -> bool:
        """True when some example has more than one node."""
        return bool((self._examples["pieces"][:-1] > 1).any())

    def _sequence(self, index: int) -> Sequence_:
        (token, span), (token_end, span_end) = self._sequences[index].item(), self._sequences[index + 1].item()
        return Sequence_(self._ids[token:token_end], [Span(*s) for s in self._spans[span:span_end].tolist()])

    def _place(self, row: Any) -> str:
        return join(self._prefixes[row["prefix"]], int(row["number"]), int(row["part"]))


def _map(folder: Path, name: str, count: int) -> np.ndarray:
    path = folder / f"{name}.bin"
    if path.stat().st_size != count * _ARRAYS[name].itemsize:
        raise ValueError(f"{path.name} has not the size that was written")
    # As a plain array: slices of a memmap are memmaps, which are slow to make.
    return np.memmap(path, dtype=_ARRAYS[name], mode="r").view(np.ndarray)


class Writer:
    """Builds a folder of examples beside others; as a context manager it leaves nothing half-built behind.

    Args:
        root: where the folder is built, and where the finished one lies.

    Raises:
        UserError: nothing can be written there.
    """

    def __init__(self, root: Path):
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=root))
        except OSError as error:
            raise _unwritable(root, error) from error
        _prune(root)
        self._root = root
        self._files = {name: (self._folder / f"{name}.bin").open("wb") for name in _ARRAYS}
        self._counts = dict.fromkeys(_ARRAYS, 0)
        self._places = Places()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            # What a full disk doesn't take is deleted anyway; the error that ended the building has said it.
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def extend(self, examples: Sequence[Example]) -> None:
        """Writes some more examples."""
        sequences = [sequence for example in examples for sequence in example.sequences]
        spans = [(s.start, s.end, s.weight, s.answer) for sequence in sequences for s in sequence.spans]
        rows: list[tuple[Any, ...]] = []
        starts: list[tuple[int, int]] = []
        token, span, first = (self._counts[name] for name in ("ids", "spans", "sequences"))
        for sequence in sequences:
            starts.append((token, span))
            token += len(sequence.ids)
            span += len(sequence.spans)
        for example in examples:
            place = self._places.split(example.place)
            rows.append((first, example.share, example.size, len(example.pieces), example.weight, *place))
            first += len(example.sequences)
        self._write("ids", np.concatenate([np.zeros(0, _IDS), *(sequence.ids for sequence in sequences)]))
        self._write("spans", np.array(spans, dtype=_SPANS))
        self._write("sequences", np.array(starts, dtype=_SEQUENCES))
        self._write("examples", np.array(rows, dtype=_EXAMPLES))

    def _write(self, name: str, values: np.ndarray) -> None:
        try:
            self._files[name].write(np.ascontiguousarray(values, dtype=_ARRAYS[name]).tobytes())
        except OSError as error:
            raise _unwritable(self._root, error) from error
        self._counts[name] += len(values)

    def finish(self, meta: dict[str, Any], name: str | None) -> Stored:
        """The examples, in the folder of that name from now on; None keeps them for this process alone."""
        last = self._counts["sequences"]
        self._write("sequences", np.array([(self._counts["ids"], self._counts["spans"])], dtype=_SEQUENCES))
        self._write("examples", np.array([(last, 0, 0, 0, 0.0, 0, -1, -1)], dtype=_EXAMPLES))
        meta = {"layout": LAYOUT, "counts": self._counts, "prefixes": self._places.prefixes, **meta}
        try:
            for file in self._files.values():
                file.close()
            (self._folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        except OSError as error:
            raise _unwritable(self._root, error) from error
        if name is None:
            # What is mapped stays readable when its name is gone.
            return Stored(self._folder)
        target = self._root / name
        if target.exists() and open_stored(target) is None:
            shutil.rmtree(target, ignore_errors=True)
        try:
            self._folder.rename(target)
        except OSError as error:
            found = open_stored(target)
            if found is None:
                raise _unwritable(target, error) from error
            return found
        return Stored(target)


def open_stored(folder: Path) -> Stored | None:
    """The examples of a folder; None where it isn't there, not whole, or of another layout."""
    try:
        found = Stored(folder)
    except ValueError:
        return None
    with contextlib.suppress(OSError):
        os.utime(folder / "meta.json")
    return found


def _prune(root: Path) -> None:
    """Deletes what nobody has used for long; a run that has it mapped keeps it all the same."""
    now = time.time()
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            building = folder.name.startswith(_BUILDING)
            if folder.is_dir() and (building or (folder / "meta.json").is_file()):
                used = max(file.stat().st_mtime for file in (folder, *folder.iterdir()))
                if now - used > (_ABANDONED if building else _UNUSED):
                    shutil.rmtree(folder, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> UserError:
    fix = "free some space there, set LONGTUNE_CACHE to another folder, or turn the cache of tokens off"
    return UserError(Problem(str(folder), f"tokens can't be kept there: {error}", fix))
