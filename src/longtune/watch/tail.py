"""Following a growing file: the complete lines that were added since the last look, and nothing twice.

Knows nothing of what the lines say. The file may be torn (a writer in the middle of a line), truncated, replaced, or
rewritten in place; a reader is then told to start anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

BLOCK = 1 << 20
LONGEST = 8 << 20
"""Bytes of the longest line that is read; a longer one is passed over, so that a broken file can't fill the memory."""
_MARK = 64


class Tail:
    """Reads a file from its beginning, and later what was added.

    Args:
        path: may not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._stamp: tuple[int, int] | None = None
        self._offset = 0
        self._mark = b""
        self._skipping = False

    def lines(self, restart: Callable[[], None] = lambda: None) -> Iterator[bytes]:
        """New complete lines, without their newline. Costs one `stat` where nothing has changed.

        Args:
            restart: called before the first line where the file is not the one that was read before: everything that
                was made of earlier lines is void.
        """
        try:
            found = os.stat(self.path)
        except OSError:
            if self._identity is not None:
                self._forget()
                restart()
            return
        identity, stamp = (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns)
        if identity == self._identity and stamp == self._stamp:
            return
        try:
            file = self.path.open("rb")
        except OSError:
            # Gone in between, or not ours to read.
            return
        with file:
            if self._identity is not None and (identity != self._identity or not self._goes_on(file, found.st_size)):
                self._forget()
                restart()
            self._identity, self._stamp = identity, stamp
            file.seek(self._offset)
            yield from self._split(file.read)

    def _split(self, read: Callable[[int], bytes]) -> Iterator[bytes]:
        rest = b""
        while block := read(BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                self._mark = (self._mark + line[-_MARK:] + b"\n")[-_MARK:]
                if not self._skipping:
                    yield line
                self._skipping = False
            if len(rest) > LONGEST:
                self._offset += len(rest)
                self._mark = rest[-_MARK:]
                self._skipping, rest = True, b""

    def _goes_on(self, file, size: int) -> bool:
        """Whether what was read before still stands in front of what comes now."""
        if size < self._offset:
            return False
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _forget(self) -> None:
        self._identity = self._stamp = None
        self._offset, self._mark, self._skipping = 0, b"", False
