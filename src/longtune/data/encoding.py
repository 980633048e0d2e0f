"""Texts with marked answers to token ids with marked answers.

A `Draft` says which characters are trained; `Encoder` says which tokens those are. Two rules (both TRL's): an answer
that follows a prompt begins at the end of the longest common prefix of the prompt's own encoding and the whole's
encoding; a stretch marked by a template takes every token that it overlaps. Templates are `template`'s work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longtune.data.problems import RowError


@dataclass(slots=True)
class Mark:
    """A trained stretch of a draft.

    Attributes:
        start, end: characters; `end` None means the end of the draft, an appended EOS included.
        weight: loss weight.
        answer: which answer it belongs to (0 the only or chosen one, -1 the prompt).
        prompt: the prompt before it, where the answer begins by the rule of the common prefix; None where the
            stretch takes the tokens that it overlaps.
    """

    start: int
    end: int | None = None
    weight: float = 1.0
    answer: int = 0
    prompt: str | None = None


@dataclass(slots=True)
class Draft:
    """A text to encode.

    Attributes:
        text: the whole text.
        marks: its trained stretches, in order.
        add_special: let the tokenizer add its own special tokens (texts that no template has rendered).
        eos: end with EOS unless the encoding does already.
        notes: what a reader of the report should know about this row.
    """

    text: str
    marks: list[Mark] = field(default_factory=list)
    add_special: bool = False
    eos: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Span:
    """Trained tokens [start, end) of a sequence, their loss weight and their answer."""

    start: int
    end: int
    weight: float = 1.0
    answer: int = 0


@dataclass(slots=True)
class Sequence_:
    """Token ids, int32 [n], and the trained spans. A span at 0 trains from token 1 on: nothing predicts token 0.

    `merged` says that tokens merge across the end of a prompt, so that its last token went to the answer.
    """

    ids: np.ndarray
    spans: list[Span]
    merged: bool = False

    @property
    def trained(self) -> int:
        """Tokens that are targets."""
        return sum(max(0, span.end - max(span.start, 1)) for span in self.spans if span.weight > 0 and span.answer >= 0)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


class Encoder:
    """Encodes drafts in batches, with the tokenizer's threads.

    Args:
        tokenizer: a transformers tokenizer; slow ones work too, at the price of encoding every prefix.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._fast = tokenizer._tokenizer if getattr(tokenizer, "is_fast", False) else None
        self._eos: int | None = tokenizer.eos_token_id
        self._bos: int | None = tokenizer.bos_token_id
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self._added_text = {index: token.content for index, token in added.items()}
        self._added = np.array(sorted(added), dtype=np.int32)
        self._tails: dict[tuple[str, bool], np.ndarray] = {}
        if self._fast is not None:
            # A tokenizer remembers the last call's truncation and padding; ours must not inherit them.
            self._fast.no_truncation()
            self._fast.no_padding()

    def has_eos(self) -> bool:
        """True.

        Raises:
            RowError: the tokenizer has no EOS.
        """
        if self._eos is None:
            raise RowError(
                "no EOS token", "the tokenizer has no EOS, so a tuned model would never stop", "set tokenizer.eos_token"
            )
        return True

    def encode(self, drafts: Sequence[Draft]) -> list[Sequence_]:
        """Sequences of the drafts, in order."""
        encodings: list[Any] = [None] * len(drafts)
        for special in (False, True):
            chosen = [i for i, draft in enumerate(drafts) if self._adds_special(draft) == special]
            for i, encoding in zip(chosen, self._batch([drafts[i].text for i in chosen], special), strict=True):
                encodings[i] = encoding
        return [self._sequence(draft, encoding) for draft, encoding in zip(drafts, encodings, strict=True)]

    def _adds_special(self, draft: Draft) -> bool:
        # A text that begins with BOS would get a second one.
        bos = self._tokenizer.bos_token
        return draft.add_special and not (bos and draft.text.startswith(bos))

    def _batch(self, texts: list[str], special: bool) -> list[Any]:
        if not texts:
            return []
        if self._fast is None:
            return [_Slow(self, text, special) for text in texts]
        return self._fast.encode_batch(texts, add_special_tokens=special)

    def ids(self, text: str, special: bool = False) -> np.ndarray:
        """Token ids of one text, int32 [n]."""
        if self._fast is None:
            ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        else:
            ids = self._fast.encode(text, add_special_tokens=special).ids
        return np.array(ids, dtype=np.int32)

    def _sequence(self, draft: Draft, encoding: Any) -> Sequence_:
        ids = np.array(encoding.ids, dtype=np.int32)
        special = self._adds_special(draft)
        added = np.flatnonzero(np.isin(ids, self._added)) if self._added.size and draft.marks else self._added
        spans: list[Span] = []
        merged = False
        for mark in draft.marks:
            if mark.prompt is None:
                start = self._token_at(encoding, mark.start, len(draft.text), len(ids))
            else:
                start, whole = self._prompt_end(draft, mark, encoding, ids, added, special)
                merged = merged or (not whole and draft.text.startswith(mark.prompt))
            end = len(ids) if mark.end is None else self._token_after(encoding, mark, len(ids))
            spans.append(Span(start, end, mark.weight, mark.answer))
        if draft.eos and not (len(ids) and ids[-1] == self._eos):
            ids = np.append(ids, np.int32(self._eos or 0))
            for mark, span in zip(draft.marks, spans, strict=True):
                if mark.end is None or mark.end == len(draft.text):
                    span.end = len(ids)
        if self._bos is not None and len(ids) > 1 and ids[0] == ids[1] == self._bos:
            ids = ids[1:]
            spans = [Span(max(0, s.start - 1), s.end - 1, s.weight, s.answer) for s in spans]
        return Sequence_(ids, spans, merged)

    @staticmethod
    def _token_at(encoding: Any, char: int, length: int, count: int) -> int:
        """First token at or after a character; normalisers may have taken the character itself."""
        for at in range(char, length):
            token = encoding.char_to_token(at)
            if token is not None:
                return token
        return count

    @staticmethod
    def _token_after(encoding: Any, mark: Mark, count: int) -> int:
        """One past the last token that covers a character of the mark."""
        for at in range((mark.end or 0) - 1, mark.start - 1, -1):
            token = encoding.char_to_token(at)
            if token is None:
                continue
            # Byte-level tokens may share one character: the last of them counts.
            while token + 1 < count:
                chars = encoding.token_to_chars(token + 1)
                if chars is None or chars[0] > at or chars[1] <= chars[0]:
                    break
                token += 1
            return token + 1
        return 0

    def _prompt_end(
        self, draft: Draft, mark: Mark, encoding: Any, ids: np.ndarray, added: np.ndarray, special: bool
    ) -> tuple[int, bool]:
        """Tokens of the prompt, the common prefix of its own encoding and the whole's; and whether that is all of it.

        Added tokens cut a text into parts that are encoded alone, so the encodings can differ only behind the last
        added token that both have; only that tail is encoded again.
        """
        prompt = mark.prompt or ""
        same = len(prompt)
        if not draft.text.startswith(prompt):
            pairs = enumerate(zip(prompt, draft.text, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), len(draft.text))
        first = 0
        char = 0
        if self._fast is not None and added.size:
            limit = self._token_at(encoding, same, len(draft.text), len(ids))
            for token in added[: np.searchsorted(added, limit)][::-1]:
                chars = encoding.token_to_chars(int(token))
                if chars is None or chars[1] > same:
                    continue
                # Not where the tokenizer merely stands for something unknown with one of them.
                if draft.text[chars[0] : chars[1]].strip() == self._added_text[int(ids[token])].strip():
                    first, char = int(token), chars[0]
                    break
        key = (prompt[char:], special and first == 0)
        tail = self._tails.get(key)
        if tail is None:
            tail = self.ids(*key)
            if len(prompt) - char < 256:
                self._tails[key] = tail
        common = common_prefix(ids[first:], tail)
        return first + common, common == len(tail)


class _Slow:
    """What `Encoder` asks of an encoding, for tokenizers that keep no offsets."""

    def __init__(self, encoder: Encoder, text: str, special: bool):
        self._encoder = encoder
        self._text = text
        self.ids = encoder.ids(text, special)
        self._special = special

    def char_to_token(self, char: int) -> int | None:
        before = self._encoder.ids(self._text[: char + 1], self._special)
        return max(0, common_prefix(self.ids, before) - 1) if len(before) else None

    def token_to_chars(self, token: int) -> tuple[int, int] | None:
        return None
