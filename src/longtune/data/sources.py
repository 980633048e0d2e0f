"""Where the rows come from: files, folders with splits, hub names, and several of these with weights.

Only finds and names them; reading is `readers`' work. A path that could be local never asks the hub.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtune.data.problems import RowError
from longtune.errors import Problem, UserError

FORMATS = (".jsonl", ".json", ".parquet", ".csv")
COMPRESSED = (".gz", ".zst")
VALIDATION = ("valid", "validation")
MOST_WEIGHT = 1000
"""Above it an epoch of a large source would not end; more epochs do the same."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.\[\]%-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Rows to read.

    Attributes:
        name: as it is printed.
        files: local files in order; empty for a hub data set.
        hub: hub name with its split ("owner/name", "train"), or None.
        weight: how many times each row is seen in an epoch (`shares`).
    """

    name: str
    files: tuple[Path, ...] = ()
    hub: tuple[str, str] | None = None
    weight: float = 1.0

    @property
    def place(self) -> str:
        """As a problem names it: its file where it is one."""
        return str(self.files[0]) if len(self.files) == 1 else self.name


Sources = str | Path | Sequence[str | Path | Mapping[str, Any]]
"""A path or hub name, or a list of such or of {"path", "weight"}."""


def file_format(path: Path) -> str | None:
    """The format's suffix (".jsonl") under any compression suffix, or None when it isn't one we read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def split_files(folder: Path, splits: Sequence[str]) -> tuple[Path, ...]:
    """Files of a split: `train.jsonl`, or shards such as `train-00000-of-00002.parquet`, sorted by name.

    Raises:
        UserError: two files would both be the whole split (`train.jsonl` beside `train.parquet`).
    """
    whole: list[Path] = []
    shards: list[Path] = []
    for path in sorted(folder.iterdir()):
        if not path.is_file() or file_format(path) is None:
            continue
        stem = path.name.split(".", 1)[0].lower()
        if stem in splits:
            whole.append(path)
        elif re.fullmatch(rf"(?:{'|'.join(splits)})[-_]\d+(?:-of-\d+)?", stem):
            shards.append(path)
    if len(whole) > 1 or (whole and shards):
        names = ", ".join(path.name for path in whole + shards)
        raise UserError(Problem(str(folder), f"several files for one split: {names}", "leave one, or name the file"))
    return tuple(whole or shards)


def resolve(sources: Sources) -> list[Source]:
    """The sources to train on; a folder gives its `train` split.

    Raises:
        UserError: every missing path, folder without a train file, unreadable suffix and bad weight, all at once.
    """
    found: list[Source] = []
    problems: list[Problem] = []
    for entry in _entries(sources):
        try:
            name, weight = _name_and_weight(entry)
            found.append(_locate(name, weight))
        except UserError as error:
            problems += error.problems
        except RowError as error:
            problems.append(Problem(str(entry), error.reason, error.fix))
    if not found and not problems:
        problems.append(Problem("data", "no data is named", "give a file, a folder or a hub name"))
    if problems:
        raise UserError(problems)
    return found


def split_sources(sources: Sources) -> tuple[Sources, Sources | None]:
    """The training source and the validation source beside it, if there is one.

    A folder with `train.*` and `valid.*` or `validation.*` gives its two files. Anything else is all training data.
    Of a list, the validation parts of its folders come together.
    """
    if isinstance(sources, str | Path):
        return str(sources), _validation(Path(sources).expanduser())
    parts: list[str] = []
    for entry in sources:
        part = _validation(Path(_name_and_weight(entry)[0]).expanduser())
        if part is not None:
            parts += [part] if isinstance(part, str) else part
    return sources, parts or None


def _validation(path: Path) -> str | list[str] | None:
    files = split_files(path, VALIDATION) if path.is_dir() else ()
    if not files:
        return None
    return str(files[0]) if len(files) == 1 else [str(file) for file in files]


def _entries(sources: Sources) -> Sequence[str | Path | Mapping[str, Any]]:
    return [sources] if isinstance(sources, str | Path | Mapping) else sources


def _name_and_weight(entry: str | Path | Mapping[str, Any]) -> tuple[str, float]:
    if isinstance(entry, str | Path):
        return str(entry), 1.0
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str | Path):
        raise RowError("source", f"a source is a path or {{path, weight}}, got {entry!r}")
    unknown = sorted(set(entry) - {"path", "weight"})
    if unknown:
        raise RowError("source", f"unknown key {', '.join(unknown)}", "a source has the keys path and weight")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise RowError("source", f"weight must be a number above 0, got {weight!r}")
    if weight > MOST_WEIGHT:
        fix = "weigh the other sources less, or train for more epochs"
        raise RowError("source", f"weight must be {MOST_WEIGHT:,} at most, got {weight!r}", fix)
    return str(entry["path"]), float(weight)


def _locate(name: str, weight: float) -> Source:
    path = Path(name).expanduser()
    if path.is_file():
        if file_format(path) is None:
            raise UserError(
                Problem(
                    name, "not a data file by its name", f"use {', '.join(FORMATS)}, plain or {'/'.join(COMPRESSED)}"
                )
            )
        return Source(name, (path,), None, weight)
    if path.is_dir():
        files = split_files(path, ("train",))
        if not files:
            there = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise UserError(Problem(name, f"no train.* in this folder (there is: {there})", "name the file itself"))
        return Source(name, files, None, weight)
    if _HUB_NAME.fullmatch(name) and file_format(path) is None and not path.parent.exists():
        repository, _, split = name.partition(":")
        return Source(name, (), (repository, split or "train"), weight)
    raise UserError(Problem(name, "no such file or folder", "check the path"))
