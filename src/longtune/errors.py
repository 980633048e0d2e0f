"""Errors that a user can act on: every problem at once, each with the place, the reason and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        place: where ("train.jsonl:12", "config.yaml: lora.rank").
        reason: what is wrong there.
        fix: what to do about it; empty when the reason says it all.
    """

    place: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.place}: {self.reason}"
        return f"{text} -> {self.fix}" if self.fix else text


class UserError(Exception):
    """The user must change something (configuration, data, a path). The command line leaves with `exit_code`."""

    exit_code = 2

    def __init__(self, problems: Problem | Sequence[Problem]):
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DoesNotFit(UserError):
    """The run does not fit the memory that it was given."""

    exit_code = 3


def fault_of_text(text: str) -> str | None:
    """Why no tokenizer can read a text (it came in bytes that are no UTF-8), or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is no text in UTF-8 (at character {error.start + 1:,})"
    return None


def counted(count: float, thing: str) -> str:
    """A number and what it is of, in words: "1 row", "1,200 rows"; a fraction to three digits: "0.25 epochs"."""
    shown = f"{count:,}" if isinstance(count, int) else f"{count:.3g}"
    return f"{shown} {thing}" + ("" if count == 1 else "s")
