"""How a step walks the grid of layers x chunks: what is kept, what is recomputed, and where it lives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from longtune.errors import Problem, UserError

BoundaryStore = Literal["device", "host", "disk"]
Keep = Literal["nothing", "attention", "everything"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A walk.

    Attributes:
        layers_per_segment: layers whose inside is recomputed together from one kept boundary; None is all layers.
        chunk_tokens: tokens of a chunk at most; None is the whole row.
        boundary_store: where boundaries (and kept attention outputs) live between forward and backward.
        head_chunk: targets whose logits exist at once; None is all.
        keep: `nothing` recomputes each cell; `attention` keeps attention outputs and log-sum-exp so that attention
            runs forward once; `everything` keeps all activations and recomputes nothing.

    Raises:
        UserError: a value is out of range (all of them at once).
    """

    layers_per_segment: int | None = 1
    chunk_tokens: int | None = None
    boundary_store: BoundaryStore = "device"
    head_chunk: int | None = 1024
    keep: Keep = "nothing"

    def __post_init__(self) -> None:
        problems = []
        for name in ("layers_per_segment", "chunk_tokens", "head_chunk"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                problems.append(Problem(f"plan: {name}", f"{value!r} is not a count of at least 1", "null means all"))
        for name, kinds in (("boundary_store", get_args(BoundaryStore)), ("keep", get_args(Keep))):
            value = getattr(self, name)
            if value not in kinds:
                problems.append(Problem(f"plan: {name}", f"{value!r} is not known", f"one of {', '.join(kinds)}"))
        if self.boundary_store == "disk":
            problems.append(Problem("plan: boundary_store", "disk is not supported yet", "use host"))
        if problems:
            raise UserError(problems)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
