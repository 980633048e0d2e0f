"""How a step walks the grid of layers x chunks: what is kept, what is recomputed, and where it lives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from longtune.errors import Problem, UserError

BoundaryStore = Literal["device", "host", "disk"]
Keep = Literal["nothing", "kv", "attention", "everything"]
KeepBelow = Literal["nothing", "kv", "attention"]

STREAM_CHUNKS = 4
"""Chunks from which on the residual stream lives off the device too, where boundaries do: with fewer, a chunk would
have to wait for its own copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A walk.

    Attributes:
        layers_per_segment: layers whose inside is recomputed together from one kept boundary; None is all layers.
        chunk_tokens: tokens of a chunk at most; None is the whole row.
        boundary_store: where boundaries (and what `keep` adds to them, activations apart) live between forward and
            backward. Off the device, rows of `STREAM_CHUNKS` chunks and more also move the residual stream and its
            gradient through host memory, chunk by chunk.
        head_chunk: targets whose logits exist at once; None is all.
        keep: `nothing` recomputes each cell; `kv` keeps keys and values, so that they are not made again before a
            layer's backward; `attention` keeps attention outputs and log-sum-exp, so that attention runs forward once;
            `everything` keeps all activations and recomputes nothing.
        keep_layers: the last layers to which `keep` applies; None is all.
        keep_below: what the layers below those keep: `nothing`, `kv` or `attention`.
        halves: run a cell's backward in two parts, behind the attention and before it, so that their graphs are never
            alive together; what comes before the attention is computed once more.

    Raises:
        UserError: a value is out of range (all of them at once).
    """

    layers_per_segment: int | None = 1
    chunk_tokens: int | None = None
    boundary_store: BoundaryStore = "device"
    head_chunk: int | None = 1024
    keep: Keep = "nothing"
    keep_layers: int | None = None
    keep_below: KeepBelow = "nothing"
    halves: bool = False

    def __post_init__(self) -> None:
        problems = []
        for name in ("layers_per_segment", "chunk_tokens", "head_chunk", "keep_layers"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                problems.append(Problem(f"plan: {name}", f"{value!r} is not a count of at least 1", "null means all"))
        for name, type in (("boundary_store", BoundaryStore), ("keep", Keep), ("keep_below", KeepBelow)):
            value, kinds = getattr(self, name), get_args(type)
            if value not in kinds:
                problems.append(Problem(f"plan: {name}", f"{value!r} is not known", f"one of {', '.join(kinds)}"))
        if not isinstance(self.halves, bool):
            problems.append(Problem("plan: halves", f"{self.halves!r} is not known", "true or false"))
        if problems:
            raise UserError(problems)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
