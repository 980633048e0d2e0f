"""Writing files of a run so that a kill at any moment leaves the old file or the new one, never half of one."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError


def write_text(path: Path, text: str | bytes) -> None:
    """Replaces a file as a whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file as a whole, indented, ending with a newline."""
    write_text(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_json(path: Path) -> Any:
    return orjson.loads(path.read_bytes())


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder (a rename is not on disk before)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Makes an OSError of safetensors' own error about a file that can't be written."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes it, flushed, when the block ends without an error."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        sync_folder(temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_leftovers(folder: Path, patterns: Sequence[str]) -> None:
    """Removes what killed writers left in a folder: hidden files and folders of the given patterns."""
    for pattern in patterns:
        for left in folder.glob(pattern):
            if left.name.startswith("."):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
