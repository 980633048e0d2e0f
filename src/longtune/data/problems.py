"""What is wrong with the data, gathered so that everything is reported at once.

Rows raise `RowError`; `Problems` keeps the first three of each kind and counts the rest. Printing and exit codes
belong to the command line.
"""

from __future__ import annotations

from longtune.errors import Problem, UserError

SHOWN = 3
"""How many problems of one kind are named before the rest are only counted."""


class RowError(Exception):
    """One row (or line) can't be used.

    Args:
        kind: short name under which the reports count it ("empty answer").
        reason: what is wrong with this row; the kind when left out.
        fix: what to do about it.
    """

    def __init__(self, kind: str, reason: str = "", fix: str = ""):
        self.kind = kind
        self.reason = reason or kind
        self.fix = fix
        super().__init__(self.reason)


class Problems:
    """Gathers problems by kind."""

    def __init__(self) -> None:
        self._shown: dict[str, list[Problem]] = {}
        self._counts: dict[str, int] = {}

    def add(self, place: str, error: RowError) -> None:
        shown = self._shown.setdefault(error.kind, [])
        if len(shown) < SHOWN:
            shown.append(Problem(place, error.reason, error.fix))
        self._counts[error.kind] = self._counts.get(error.kind, 0) + 1

    def merge(self, other: Problems) -> None:
        """Takes over those of another, which come after these."""
        for kind, shown in other._shown.items():
            mine = self._shown.setdefault(kind, [])
            mine += shown[: max(0, SHOWN - len(mine))]
            self._counts[kind] = self._counts.get(kind, 0) + other._counts[kind]

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def shown(self) -> dict[str, list[Problem]]:
        """The first three of each kind."""
        return {kind: list(problems) for kind, problems in self._shown.items()}

    @property
    def counts(self) -> dict[str, int]:
        """How many problems there are of each kind."""
        return dict(self._counts)

    def listed(self) -> list[Problem]:
        """The first three of each kind, and one line with a count where there are more."""
        problems: list[Problem] = []
        for kind, shown in self._shown.items():
            problems += shown
            more = self._counts[kind] - len(shown)
            if more:
                source = shown[0].place.rpartition(":")[0] or shown[0].place
                problems.append(Problem(source, f"{more} more of this kind ({kind}), {self._counts[kind]} in all"))
        return problems

    def raise_if_any(self) -> None:
        """Raises `UserError` with all problems."""
        if self:
            raise UserError(self.listed())
