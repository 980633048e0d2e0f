"""Measurements written down as they are made, so that a stopped run goes on where it was.

One JSON line each, flushed to disk; the first line says what is measured. A line that a kill cut short is dropped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from longtune.errors import Problem, UserError


class Journal:
    """The figures of one measurement.

    Args:
        file: appended to; made where there is none.
        about: what is measured: plain values that must be the same for the figures to be used again.

    Attributes:
        figures: KL by (module, bits), those of earlier runs included.

    Raises:
        UserError: the file is of another measurement, or is no journal.
        OSError: it can't be written; so for every figure.
    """

    def __init__(self, file: Path, about: dict[str, Any]):
        self.file = file
        self.figures: dict[tuple[str, int], float] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = self._read(about) if file.exists() else 0
        # Unbuffered: nothing waits that could fail once more when the file is closed.
        self._stream = file.open("r+b" if file.exists() else "w+b", buffering=0)
        try:
            self._stream.truncate(whole)
            self._stream.seek(whole)
            if not whole:
                self._write({"about": about})
        except BaseException:
            self._stream.close()
            raise

    def _read(self, about: dict[str, Any]) -> int:
        """Bytes of whole lines; their figures are taken."""
        fix = "remove it to measure anew, or name another --out"
        whole = 0
        for number, line in enumerate(self.file.read_bytes().splitlines(keepends=True)):
            try:
                values = json.loads(line) if line.endswith(b"\n") else None
                if values is None:
                    break
                if number == 0:
                    found = values["about"]
                else:
                    self.figures[str(values["module"]), int(values["bits"])] = float(values["kl"])
            except (ValueError, KeyError, TypeError) as error:
                reason = f"line {number + 1} is no measurement ({error})"
                raise UserError(Problem(str(self.file), reason, fix)) from None
            if number == 0 and found != about:
                other = [key for key in {**found, **about} if found.get(key) != about.get(key)]
                reason = f"holds a measurement with another {', '.join(other)}"
                raise UserError(Problem(str(self.file), reason, fix))
            whole += len(line)
        return whole

    def add(self, module: str, bits: int, kl: float) -> None:
        """One figure, on disk when this returns."""
        self.figures[module, bits] = kl
        self._write({"module": module, "bits": bits, "kl": kl})

    def _write(self, values: dict[str, Any]) -> None:
        line = json.dumps(values).encode() + b"\n"
        while line:
            line = line[self._stream.write(line) :]
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()

    def remove(self) -> None:
        self.close()
        self.file.unlink(missing_ok=True)
