"""Places of rows ("train.jsonl:12", "rows.json:row 3", "long.jsonl:7[2]"), a few bytes each however many there are."""

from __future__ import annotations

import re
from array import array

_PLACE = re.compile(r"(.*?)(\d{1,18})?(?:\[(\d{1,9})\])?", re.DOTALL)

Split = tuple[int, int, int]
"""Index of the text before the number; the number; the part in brackets. -1 where there is none."""


class Places:
    """A list of places. Their beginnings, of which there are as many as files, are kept once."""

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}
        self._columns = (array("i"), array("q"), array("i"))

    def __len__(self) -> int:
        return len(self._columns[0])

    @property
    def prefixes(self) -> list[str]:
        return list(self._prefixes)

    def split(self, place: str) -> Split:
        """The parts of a place, without adding it."""
        match = _PLACE.fullmatch(place)
        prefix, number, part = match.groups() if match else (place, None, None)
        if number is not None and str(int(number)) != number:
            prefix, number = prefix + number, None
        index = self._prefixes.setdefault(prefix, len(self._prefixes))
        return index, -1 if number is None else int(number), -1 if part is None else int(part)

    def append(self, place: str) -> None:
        for column, value in zip(self._columns, self.split(place), strict=True):
            column.append(value)

    def __getitem__(self, index: int) -> str:
        prefix, number, part = (column[index] for column in self._columns)
        return join(self.prefixes[prefix], number, part)


def join(prefix: str, number: int, part: int) -> str:
    """The place that has these parts."""
    return prefix + (str(number) if number >= 0 else "") + (f"[{part}]" if part >= 0 else "")
