"""What `longtune check` wants to know of each row, beside what makes it an error: lengths, ends, special tokens.

Runs where the row is prepared (maybe in a forked process), so it hands back small values alone. Sums, percentiles and
duplicates over all rows are `check`'s work.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

import numpy as np

from longtune.data.encoding import Encoder, Sequence_
from longtune.data.pipeline import Drafted
from longtune.data.rows import Row
from longtune.data.trees import Example

NO_END = "no end after the answer"
DOUBLED = "doubled special token"
IN_CONTENT = "special token in content"
IN_TEXT = "special token in text"

FIXES = {
    NO_END: "the tuned model may never stop: check the template, or end the answers with the end-of-turn token",
    DOUBLED: "a token stands twice in a row: take it out of the data if the template or tokenizer adds it already",
    IN_CONTENT: "the tokenizer reads it as a token, not as text: is this text rendered by a template already?",
    IN_TEXT: "these rows look rendered by a template already; it must be this model's",
}
"""What to do about each kind of finding."""

_ALWAYS = 64
_SAMPLED = 32


class Look(NamedTuple):
    """Of one row, in tokens; before any cut.

    Attributes:
        place: where the row is.
        prompt: before the first trained token.
        answer: trained (of a pair: the chosen answer).
        rejected: trained of a pair's other answers, together; -1 where there is none.
        whole: its longest sequence.
        digest: 64 bits of all its token ids; equal rows have equal digests.
        added: tokens that are not in its messages' contents, but come from the template; -1 where not looked at.
        findings: (kind, reason) of what looks wrong.
    """

    place: str
    prompt: int
    answer: int
    rejected: int
    whole: int
    digest: int
    added: int
    findings: tuple[tuple[str, str], ...]


class Inspector:
    """Looks at rows.

    Args:
        tokenizer: the one that the rows are encoded with.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {index: token.content for index, token in added.items() if token.special}
        special |= {tokenizer.convert_tokens_to_ids(token): token for token in tokenizer.all_special_tokens}
        self._names = special
        longest_first = sorted(filter(None, special.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._blank: dict[int, bool] = {}
        self._seen = 0

    def __call__(self, item: Drafted, sequences: list[Sequence_], examples: list[Example]) -> Look:
        """What there is to say of a row."""
        first = sequences[0]
        pair = item.row.kind == "preference"
        trained = [span for span in first.spans if span.answer >= 0 and span.weight > 0]
        found = [*self._ends(sequences, pair), *self._doubled(sequences), *self._in_content(item.row)]
        answers = [sequence.trained for sequence in sequences]
        return Look(
            item.place,
            trained[0].start if trained else len(first.ids),
            answers[0] if pair else sum(answers),
            sum(answers[1:]) if pair else -1,
            max(len(sequence.ids) for sequence in sequences),
            self._digest(sequences),
            self._added(item.row, first),
            tuple(found),
        )

    @staticmethod
    def _digest(sequences: list[Sequence_]) -> int:
        state = hashlib.blake2b(digest_size=8)
        for sequence in sequences:
            state.update(len(sequence.ids).to_bytes(8, "little"))
            state.update(sequence.ids.tobytes())
        return int.from_bytes(state.digest(), "little")

    def _ends(self, sequences: list[Sequence_], pair: bool) -> list[tuple[str, str]]:
        found = []
        for sequence in sequences if pair else sequences[:1]:
            spans = [span for span in sequence.spans if span.answer >= 0 and span.weight > 0 and span.end > span.start]
            if not spans:
                continue
            last = max(spans, key=lambda span: span.end)
            at = last.end - 1
            while at > last.start and self._is_blank(int(sequence.ids[at])):
                at -= 1
            token = int(sequence.ids[at])
            if token not in self._names and token != self._tokenizer.eos_token_id:
                ending = self._tokenizer.decode(sequence.ids[max(last.start, at - 7) : last.end].tolist())
                found.append((NO_END, f"the last trained tokens are {ending!r}, with no end-of-turn token or EOS"))
        return found

    def _is_blank(self, token: int) -> bool:
        known = self._blank.get(token)
        if known is None:
            known = self._blank[token] = token not in self._names and not self._tokenizer.decode([token]).strip()
        return known

    def _doubled(self, sequences: list[Sequence_]) -> list[tuple[str, str]]:
        for sequence in sequences:
            ids = sequence.ids
            for at in np.flatnonzero(ids[1:] == ids[:-1]).tolist():
                if name := self._names.get(int(ids[at])):
                    return [(DOUBLED, f"{name} stands twice in a row, at token {at}")]
        return []

    def _in_content(self, row: Row) -> list[tuple[str, str]]:
        if self._pattern is None:
            return []
        messages = _messages(row)
        for number, message in enumerate(messages, 1):
            if match := self._pattern.search(message["content"]):
                return [(IN_CONTENT, f"message {number} ({message['role']}) holds {match[0]}")]
        strings = [part for part in (row.text, row.prompt, *row.answers) if isinstance(part, str)]
        for match in filter(None, map(self._pattern.search, strings)):
            return [(IN_TEXT, f"the text holds {match[0]}")]
        return []

    def _added(self, row: Row, first: Sequence_) -> int:
        """Looked at for the first rows, and then for some: it encodes them again."""
        self._seen += 1
        messages = row.messages or _messages(row, answers=1)
        if not messages or (self._seen > _ALWAYS and self._seen % _SAMPLED):
            return -1
        return max(0, len(first.ids) - sum(len(self._encoder.ids(message["content"])) for message in messages))


def _messages(row: Row, answers: int | None = None) -> list[dict[str, Any]]:
    parts = [row.messages, row.prompt, *row.answers[:answers]]
    return [message for part in parts if isinstance(part, list) for message in part]
