"""Files or hub data sets to records: plain dictionaries, each with its place ("train.jsonl:12").

Knows file formats and compression; what the columns mean is `formats`' work. Malformed lines don't stop the
reading: they come out as `RowError` in the place of the record, so that all of them can be reported.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from longtune.data.problems import RowError
from longtune.data.sources import Source, file_format
from longtune.errors import Problem, UserError

Record = dict[str, Any]

MALFORMED = "malformed line"


def read(source: Source) -> Iterator[tuple[str, Record | RowError]]:
    """All records of a source in order, each with its place; a malformed one is a `RowError`.

    Raises:
        UserError: a file is empty, can't be decompressed, or isn't what its name says.
    """
    if source.hub is not None:
        yield from _read_hub(*source.hub)
        return
    for path in source.files:
        count = 0
        try:
            for item in _READERS[file_format(path) or ".jsonl"](path):
                count += 1
                yield item
        except (OSError, EOFError, gzip.BadGzipFile) as error:
            raise UserError(Problem(str(path), f"can't be read: {error}")) from error
        if not count:
            raise UserError(Problem(str(path), "the file has no rows", "check that it was written completely"))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield file  # pyright: ignore[reportReturnType]
    elif suffix == ".zst":
        try:
            import zstandard  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError(
                Problem(str(path), "needs the package zstandard", "pip install zstandard, or decompress the file")
            ) from None
        with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            yield io.BufferedReader(stream)
    else:
        with path.open("rb") as file:
            yield file


def _record(value: Any) -> Record | RowError:
    if not isinstance(value, dict):
        return RowError(MALFORMED, f"a row must be an object with columns, this is {_type_name(value)}")
    return value


def _type_name(value: Any) -> str:
    names = {str: "a string", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _parse(line: bytes) -> Record | RowError:
    try:
        return _record(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        return RowError(MALFORMED, f"not valid JSON: {error}", "fix the line or take it out")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Record | RowError]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{path}:{number}", _parse(line)


def _read_json(path: Path) -> Iterator[tuple[str, Record | RowError]]:
    with _open(path) as file:
        text = file.read().removeprefix(b"\xef\xbb\xbf")
    if not text.strip():
        return
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # JSON lines under the name .json are common; the first line tells.
        first = text.lstrip().split(b"\n", 1)[0]
        if isinstance(_parse(first), RowError):
            line = getattr(error, "lineno", 1)
            raise UserError(Problem(f"{path}:{line}", f"not valid JSON: {error}", "fix the file")) from error
        yield from _read_jsonl(path)
        return
    if isinstance(value, dict):
        lists = [column for column in ("data", "rows", "train") if isinstance(value.get(column), list)]
        value = value[lists[0]] if lists else [value]
    if not isinstance(value, list):
        raise UserError(Problem(str(path), "must hold a list of rows", "write one JSON object for each row"))
    for number, row in enumerate(value, 1):
        yield f"{path}:row {number}", _record(row)


def _read_parquet(path: Path) -> Iterator[tuple[str, Record | RowError]]:
    import pyarrow
    from pyarrow import parquet

    if path.suffix.lower() != ".parquet":
        raise UserError(Problem(str(path), "compressed parquet is not read", "parquet compresses itself"))
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:row {number}", row
    except pyarrow.ArrowException as error:
        raise UserError(Problem(str(path), f"not a readable parquet file: {error}")) from error


def _read_csv(path: Path) -> Iterator[tuple[str, Record | RowError]]:
    # The csv module refuses fields above 128 KiB, and its limit is one for the whole process: it is put back.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        rows = list(_csv_rows(path))
    except UnicodeDecodeError as error:
        raise UserError(Problem(str(path), f"not UTF-8: {error}", "save the file as UTF-8")) from error
    finally:
        csv.field_size_limit(limit)
    yield from rows


def _csv_rows(path: Path) -> Iterator[tuple[str, Record | RowError]]:
    with _open(path) as file:
        reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
        header: list[str] = []
        while True:
            place = f"{path}:{reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield place, RowError(MALFORMED, f"not valid CSV: {error}", "quote fields that hold commas or newlines")
                continue
            if not header:
                header = [name.strip() for name in fields]
            elif fields and len(fields) != len(header):
                yield (
                    place,
                    RowError(
                        MALFORMED,
                        f"{len(fields)} fields, the header has {len(header)}",
                        "quote fields that hold commas or newlines",
                    ),
                )
            elif fields:
                yield place, dict(zip(header, fields, strict=True))


def _read_hub(name: str, split: str) -> Iterator[tuple[str, Record | RowError]]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub client raises many unrelated types, each of which means "not there"
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            Problem(name, f"not a local path, and the hub gives no such data set: {reason}", "check the name")
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{name}:row {number}", _record(dict(row))


def parse_json_text(value: Any) -> Any:
    """Columns of CSV (and some parquet) files hold JSON as text: the parsed list or object, else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
