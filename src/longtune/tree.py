"""Token trees and forests: what one training step attends to, and what it is trained on.

A `Tree` is one training example: nodes (runs of tokens with one parent each) and targets. Supervised
rows are one node; a preference pair is a prompt node with two children. A `Forest` is several trees
laid end to end in one row of T tokens without padding. This module knows tokens, parents, positions
and paths; it knows nothing of models, devices or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

PROMPT = -1
"""Value of `Targets.answer` for targets that belong to the prompt and not to any answer."""


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens.

    Attributes:
        tokens: token ids, int64 [n], n >= 1.
        parent: index of the parent in the tree's list of nodes; -1 for a root. A parent comes before its children.
    """

    tokens: torch.Tensor
    parent: int = -1


@dataclass(frozen=True, slots=True)
class Targets:
    """What is trained: M pairs of a hidden state and the token that it should predict.

    Attributes:
        hidden: column of the hidden state in its tree (or forest), int64 [M].
        token: the token to predict, int64 [M].
        weight: weight of the target, float32 [M]; every weight is > 0.
        answer: which answer of the tree the target belongs to, int64 [M]: 0 is the only or chosen one, 1 and
            up are rejected ones, `PROMPT` is the prompt.
        tree: which tree of the forest the target belongs to, int64 [M]; all zero within a tree.
    """

    hidden: torch.Tensor
    token: torch.Tensor
    weight: torch.Tensor
    answer: torch.Tensor
    tree: torch.Tensor

    @classmethod
    def of(
        cls,
        hidden: Sequence[int] | torch.Tensor,
        token: Sequence[int] | torch.Tensor,
        weight: Sequence[float] | torch.Tensor | None = None,
        answer: Sequence[int] | torch.Tensor | None = None,
    ) -> Targets:
        """Targets of one tree; weights default to one, answers to 0."""
        hidden_M = torch.as_tensor(hidden, dtype=torch.int64)
        count = hidden_M.numel()
        return cls(
            hidden=hidden_M,
            token=torch.as_tensor(token, dtype=torch.int64),
            weight=torch.ones(count) if weight is None else torch.as_tensor(weight, dtype=torch.float32),
            answer=torch.zeros(count, dtype=torch.int64)
            if answer is None
            else torch.as_tensor(answer, dtype=torch.int64),
            tree=torch.zeros(count, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return self.hidden.numel()

    def without_prompt(self) -> Targets:
        """The targets that belong to an answer."""
        kept = self.answer != PROMPT
        return Targets(self.hidden[kept], self.token[kept], self.weight[kept], self.answer[kept], self.tree[kept])


@dataclass(frozen=True, slots=True)
class Tree:
    """One training example.

    Attributes:
        nodes: the nodes, parents before children. Their tokens laid end to end are the tree's columns.
        targets: what is trained, with columns counted within this tree.
        row: where the example comes from, for reports ("train.jsonl:12").
        weight: weight of the example in losses that average over examples.
        first_position: position id of the root's first token, for models whose caller says so (left padding).
        reference: a reference model's log-prob of each answer (the sum over its targets), for objectives that use one.
    """

    nodes: tuple[Node, ...]
    targets: Targets
    row: str = ""
    weight: float = 1.0
    first_position: int = 0
    reference: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a tree needs at least one node")
        for index, node in enumerate(self.nodes):
            if node.tokens.numel() == 0:
                raise ValueError(f"node {index} of the tree ({self.row or 'unnamed row'}) is empty")
            if not -1 <= node.parent < index:
                raise ValueError(f"node {index} has parent {node.parent}: a parent must come before its children")

    @classmethod
    def sequence(
        cls,
        tokens: Sequence[int] | torch.Tensor,
        weights: Sequence[float] | torch.Tensor | None = None,
        row: str = "",
        weight: float = 1.0,
    ) -> Tree:
        """A tree of one node.

        Args:
            tokens: token ids [n].
            weights: weight with which each token is trained as a target [n]; 0 is untrained. The first token
                can't be trained (nothing predicts it). None trains all others with weight 1.
        """
        tokens_n = torch.as_tensor(tokens, dtype=torch.int64)
        if weights is None:
            weights_n = torch.ones(tokens_n.numel())
        else:
            weights_n = torch.as_tensor(weights, dtype=torch.float32)
        column = weights_n[1:].nonzero().flatten()
        targets = Targets.of(column, tokens_n[column + 1], weights_n[column + 1])
        return cls((Node(tokens_n),), targets, row, weight)

    @property
    def size(self) -> int:
        """Tokens in all nodes."""
        return sum(node.tokens.numel() for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one node that lies in one chunk.

    Attributes:
        start, end: columns of the row.
        position: depth of the first token in its tree; the others follow.
        past: all earlier tokens on the path, as column ranges in path order, neighbours merged. Their positions
            are contiguous and end at `position`.
    """

    start: int
    end: int
    position: int
    past: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of consecutive columns of the row: the unit of work along the sequence."""

    index: int
    start: int
    end: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Placed:
    """A node with its place in the forest."""

    start: int
    end: int
    position: int
    parent: int
    first_position: int


@dataclass(frozen=True)
class Forest:
    """Trees laid end to end in one row of T tokens; no padding, and no attention across trees.

    Attributes:
        trees: the trees.
        tokens: int64 [T].
        positions: position id of each token, int64 [T]: its depth in its tree plus the tree's `first_position`.
        targets: all targets, with columns of the row and the index of their tree.
        offsets: column at which each tree begins.
    """

    trees: tuple[Tree, ...]
    tokens: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    targets: Targets = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    _placed: tuple[_Placed, ...] = field(init=False, repr=False)

    def __init__(self, trees: Sequence[Tree], prompt_targets: bool = True):
        """Lay trees end to end.

        Args:
            prompt_targets: False leaves out the targets that lie in prompts (`PROMPT`).
        """
        if not trees:
            raise ValueError("a forest needs at least one tree")
        placed: list[_Placed] = []
        offsets: list[int] = []
        column = 0
        for tree in trees:
            offsets.append(column)
            first = len(placed)
            for node in tree.nodes:
                parent = first + node.parent if node.parent >= 0 else -1
                position = placed[parent].position + placed[parent].end - placed[parent].start if parent >= 0 else 0
                end = column + node.tokens.numel()
                placed.append(_Placed(column, end, position, parent, tree.first_position))
                column += node.tokens.numel()
        set_ = object.__setattr__
        set_(self, "trees", tuple(trees))
        set_(self, "offsets", tuple(offsets))
        set_(self, "_placed", tuple(placed))
        set_(self, "tokens", torch.cat([node.tokens for tree in trees for node in tree.nodes]))
        set_(
            self,
            "positions",
            torch.cat([torch.arange(p.end - p.start) + p.position + p.first_position for p in placed]),
        )
        parts = [tree.targets if prompt_targets else tree.targets.without_prompt() for tree in trees]
        set_(
            self,
            "targets",
            Targets(
                hidden=torch.cat([t.hidden + offset for t, offset in zip(parts, offsets, strict=True)]),
                token=torch.cat([t.token for t in parts]),
                weight=torch.cat([t.weight for t in parts]),
                answer=torch.cat([t.answer for t in parts]),
                tree=torch.cat([torch.full_like(t.tree, i) for i, t in enumerate(parts)]),
            ),
        )

    @property
    def size(self) -> int:
        """Tokens in the row, T."""
        return self.tokens.numel()

    @property
    def is_single_sequence(self) -> bool:
        """True for one tree of one node: ordinary causal attention over the whole row."""
        return len(self._placed) == 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of every path from a root to a leaf."""
        parents = {placed.parent for placed in self._placed}
        return [p.position + p.end - p.start for i, p in enumerate(self._placed) if i not in parents]

    def path(self, node: int) -> list[tuple[int, int]]:
        """Column ranges from the root to `node` (counted over the whole forest), neighbours merged."""
        ranges: list[tuple[int, int]] = []
        while node >= 0:
            placed = self._placed[node]
            if ranges and ranges[-1][0] == placed.end:
                ranges[-1] = (placed.start, ranges[-1][1])
            else:
                ranges.append((placed.start, placed.end))
            node = placed.parent
        return ranges[::-1]

    def chunks(self, chunk_tokens: int | None = None) -> tuple[Chunk, ...]:
        """The row cut into chunks of at most `chunk_tokens` (None: one chunk)."""
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        step = chunk_tokens or self.size
        return tuple(
            Chunk(index, start, min(start + step, self.size), tuple(self._spans(start, min(start + step, self.size))))
            for index, start in enumerate(range(0, self.size, step))
        )

    def _spans(self, start: int, end: int) -> Iterator[Span]:
        for index, node in enumerate(self._placed):
            low, high = max(node.start, start), min(node.end, end)
            if low >= high:
                continue
            *ancestors, (begin, _) = self.path(index)
            past = (*ancestors, (begin, low)) if begin < low else tuple(ancestors)
            yield Span(low, high, node.position + low - node.start, past)
