"""Where a command's output goes: refused before the work where nothing can be made there, and afterwards in the same
words where the disk is full.

What a run writes as it goes, and what survives a kill, is the work of `train/files.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longtune.errors import Problem, UserError

_FIX = "choose another place, or make room"


def check_output(path: Path, place: str, *, folder: bool = False, fix: str = _FIX) -> None:
    """Refuse a place at which nothing can be made, before the work is done. Nothing is left there.

    Args:
        path: what is to be written; folders above it are made when it is.
        place: what the user named ("--out q/8bit").
        folder: it is to be a folder.

    Raises:
        UserError: it can't be.
    """
    with writing(place, fix):
        if _is_stream(path):
            return
        if path.exists() and path.is_dir() is not folder:
            raise UserError(Problem(place, "is a file" if folder else "is a folder", "choose another name"))
        nearest = next(parent for parent in path.absolute().parents if parent.exists())
        os.rmdir(tempfile.mkdtemp(prefix=f".{path.name}-", dir=nearest))


@contextmanager
def writing(place: str, fix: str = _FIX) -> Iterator[None]:
    """Makes a UserError of what keeps the block from writing; to be put around the writing alone."""
    try:
        yield
    except Exception as error:
        from safetensors import SafetensorError  # Here, as a command that only reads needs none.

        if not isinstance(error, OSError | SafetensorError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(Problem(place, f"can't be written ({reason})", fix)) from error


def write_output(path: Path, text: str, place: str) -> None:
    """Write a file as a whole or not at all, with the folders above it. A device or a pipe is written to as it is.

    Raises:
        UserError: it can't be written.
    """
    with writing(place):
        if _is_stream(path):
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()  # A link stays one.
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
