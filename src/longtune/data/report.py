"""What became of the data: counts and notes that a run prints before its first step. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longtune.errors import counted

UNTRAINED = "positions past that are untrained unless its RoPE scaling covers them"


def past_positions(longest: int, positions: int | None, what: str = "the longest row") -> list[str]:
    """What to say of a row with more tokens than the model was made for; nothing where it has not."""
    if positions is None or longest <= positions:
        return []
    return [f"{what} has {counted(longest, 'token')} and the model was made for {positions:,}: {UNTRAINED}"]


@dataclass(slots=True)
class Report:
    """Counts over all sources.

    Attributes:
        formats: rows by format name ("chat").
        columns: for each format, the columns that were read.
        rows: records in the sources.
        kept: examples to train on (`split` makes several of a row).
        dropped: rows left out, by reason.
        truncated: rows that were cut.
        tokens: tokens of all trees.
        trained: targets that belong to answers.
        longest: tokens of the longest sequence.
        sharing: preference rows by how much of the prompt is shared (fully, partly, not).
        saved: tokens that sharing saves.
        notes: things worth knowing, with the number of rows.
    """

    formats: Counter[str] = field(default_factory=Counter)
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    sharing: Counter[str] = field(default_factory=Counter)
    saved: int = 0
    notes: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Report) -> None:
        """Adds the counts of another part of the sources."""
        for name, columns in other.columns.items():
            self.columns.setdefault(name, columns)
        for name in ("formats", "dropped", "sharing", "notes"):
            getattr(self, name).update(getattr(other, name))
        for name in ("rows", "kept", "truncated", "tokens", "trained", "saved"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)

    def lines(self) -> list[str]:
        """Lines to print."""
        lines = [
            f"{counted(count, 'row')} of {name} ({', '.join(self.columns.get(name, []))})"
            for name, count in self.formats.items()
        ]
        lines.append(
            f"{counted(self.kept, 'example')}, {counted(self.tokens, 'token')}, {self.trained:,} trained, "
            f"longest {self.longest:,}"
        )
        lines += [f"dropped {count:,}: {reason}" for reason, count in self.dropped.items()]
        if self.truncated:
            lines.append(f"cut to the limit: {self.truncated:,}")
        if self.sharing:
            shares = ", ".join(f"{count:,} {how}" for how, count in self.sharing.items())
            lines.append(f"prompt shared: {shares}; {counted(self.saved, 'token')} saved")
        lines += [f"note: {note} ({counted(count, 'row')})" for note, count in self.notes.items()]
        return lines

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """A report from what `as_dict` gave."""
        counters = {name: Counter(values[name]) for name in ("formats", "dropped", "sharing", "notes")}
        return cls(**{**values, **counters})

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "formats": dict(self.formats),
            "columns": self.columns,
            "rows": self.rows,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "truncated": self.truncated,
            "tokens": self.tokens,
            "trained": self.trained,
            "longest": self.longest,
            "sharing": dict(self.sharing),
            "saved": self.saved,
            "notes": dict(self.notes),
        }
