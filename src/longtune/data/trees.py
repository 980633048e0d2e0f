"""Sequences of one example to a token tree: what is common at the front is kept once.

An `Example` holds the sequences compactly (int32 ids, spans); its `Tree` is built when a batch asks for it, so that a
large data set does not keep its targets in memory. Truncation happens here too, on all sequences of an example alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from longtune.data.encoding import Sequence_, Span, common_prefix

if TYPE_CHECKING:
    from longtune.tree import Tree

PROMPT = -1
"""As `longtune.tree.PROMPT`, whose module imports torch."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A node of the tree: tokens [start, end) of one sequence under a parent node (-1: a root)."""

    parent: int
    sequence: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Example:
    """One training example.

    Attributes:
        place: where it comes from ("train.jsonl:12").
        weight: loss weight of the example.
        sequences: its sequences; one for most supervised rows, one for each answer of a pair.
        pieces: the tree's nodes, parents first.
        paths: for each sequence, the nodes that it goes through.
        share: leading tokens that its sequences might share; makes the same nodes again from the sequences.
    """

    place: str
    weight: float
    sequences: tuple[Sequence_, ...]
    pieces: tuple[Piece, ...]
    paths: tuple[tuple[int, ...], ...]
    share: int

    @classmethod
    def of(cls, place: str, weight: float, sequences: Sequence[Sequence_], share: int | None = None) -> Example:
        """An example whose sequences share at most `share` leading tokens (None: all that are common; 0: none)."""
        limit = max(len(s.ids) for s in sequences) if share is None else share
        pieces, paths = _grow(sequences, limit)
        return cls(place, weight, tuple(sequences), tuple(pieces), tuple(map(tuple, paths)), limit)

    @property
    def size(self) -> int:
        """Tokens of the tree."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max(len(sequence.ids) for sequence in self.sequences)

    @property
    def trained(self) -> int:
        """Targets that belong to answers."""
        return sum(sequence.trained for sequence in self.sequences)

    @property
    def shared(self) -> int:
        """Tokens of the node that all sequences share; 0 where there is none."""
        roots = sum(piece.parent == -1 for piece in self.pieces)
        return self.pieces[0].end if roots == 1 and len(self.sequences) > 1 else 0

    def tree(self) -> Tree:
        """The token tree. Its targets go sequence by sequence; a shared token has a target for each branch."""
        import torch

        from longtune.tree import Node, Targets, Tree

        starts = np.cumsum([0] + [piece.end - piece.start for piece in self.pieces])
        hidden, tokens, weights, answers = [], [], [], []
        for index, sequence in enumerate(self.sequences):
            columns = self._columns(index, starts)
            for span in sequence.spans:
                first = max(span.start, 1)
                if span.weight <= 0 or span.end <= first:
                    continue
                hidden.append(columns[first - 1 : span.end - 1])
                tokens.append(sequence.ids[first : span.end])
                weights.append(np.full(span.end - first, span.weight, dtype=np.float32))
                answers.append(np.full(span.end - first, span.answer, dtype=np.int64))
        nodes = tuple(
            Node(torch.from_numpy(self.sequences[p.sequence].ids[p.start : p.end].astype(np.int64)), p.parent)
            for p in self.pieces
        )
        targets = Targets.of(
            torch.from_numpy(np.concatenate(hidden).astype(np.int64)),
            torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            torch.from_numpy(np.concatenate(weights)),
            torch.from_numpy(np.concatenate(answers)),
        )
        return Tree(nodes, targets, self.place, self.weight)

    def _columns(self, index: int, starts: np.ndarray) -> np.ndarray:
        """Column of each token of a sequence, int64 [n]."""
        ranges = []
        for number in self.paths[index]:
            ranges.append(np.arange(starts[number], starts[number + 1]))
        return np.concatenate(ranges)


def _grow(sequences: Sequence[Sequence_], share: int) -> tuple[list[Piece], list[list[int]]]:
    """The nodes of the tree of these sequences, and the nodes on the path of each."""
    pieces: list[Piece] = []
    paths: list[list[int]] = [[] for _ in sequences]
    todo = [(list(range(len(sequences))), 0, -1)]
    while todo:
        members, start, parent = todo.pop()
        ids = sequences[members[0]].ids
        end = len(ids)
        if len(members) > 1:
            end = min(share, *(start + common_prefix(ids[start:], sequences[m].ids[start:]) for m in members[1:]))
        if end > start:
            for member in members:
                paths[member].append(len(pieces))
            pieces.append(Piece(parent, members[0], start, end))
            parent = len(pieces) - 1
        groups: dict[tuple[int, int], list[int]] = {}
        for member in members:
            if len(sequences[member].ids) > end:
                token = int(sequences[member].ids[end])
                groups.setdefault((token, -1) if end < share else (token, member), []).append(member)
        todo += [(group, end, parent) for group in reversed(groups.values())]
    return pieces, paths


def pair_sequences(sequences: Sequence[Sequence_]) -> tuple[list[Sequence_], int]:
    """The sequences of a pair with the prompt's own targets on the chosen one, and how far they may share.

    Sharing ends before the first answer begins, and where the encodings stop agreeing.
    """
    share = min(sequence.spans[0].start for sequence in sequences)
    for sequence in sequences[1:]:
        share = min(share, common_prefix(sequences[0].ids, sequence.ids))
    chosen = sequences[0]
    prompt = Span(1, chosen.spans[0].start, 1.0, PROMPT)
    spans = [prompt, *chosen.spans] if prompt.end > prompt.start else chosen.spans
    return [Sequence_(chosen.ids, spans), *sequences[1:]], share


def cut_right(sequence: Sequence_, count: int) -> Sequence_:
    """The first `count` tokens."""
    spans = [Span(s.start, min(s.end, count), s.weight, s.answer) for s in sequence.spans if s.start < count]
    return Sequence_(sequence.ids[:count], spans)


def cut_left(sequence: Sequence_, excess: int) -> Sequence_:
    """All but the first `excess` tokens."""
    spans = [
        Span(max(s.start - excess, 0), s.end - excess, s.weight, s.answer) for s in sequence.spans if s.end > excess
    ]
    return Sequence_(sequence.ids[excess:], spans)


def windows(sequence: Sequence_, count: int) -> list[Sequence_]:
    """The sequence in windows of at most `count` tokens.

    Each window begins with the last token of the one before, so that every token is trained exactly once.
    """
    step = max(1, count - 1)
    starts = range(0, max(1, len(sequence.ids) - 1), step)
    return [cut_right(cut_left(sequence, start), count) if start else cut_right(sequence, count) for start in starts]
