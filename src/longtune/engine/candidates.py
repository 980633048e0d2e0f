"""The plans that a planner may try, in the order in which it should.

Ladders are plans that keep the same in the same place, with ever smaller chunks: time and memory fall along them. What
a plan takes, and which one is chosen, is the planner's (`planner.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longtune.engine.plan import Plan

CHUNKS = (131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024, 512)
"""Chunks that are tried, besides the whole row."""

HEAD_CHUNK = 1024
KEYS = ("chunk_tokens", "layers_per_segment", "boundary_store", "head_chunk", "keep")
"""The keys that make up a plan; where all are given, nothing is left to choose."""

KEEPS = ("everything", "attention", "nothing")

_SMALL = 2048
"""Tokens of a chunk below which it takes little beside keys, values and weights, and is slow to run and to trace."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The plans for one model on one kind of device.

    Attributes:
        kind: the device's type; on a CPU the host is the device.
        layers: of the model.
        chunkable: whether chunks can be walked apart.
    """

    kind: str
    layers: int
    chunkable: bool

    def ladders(self, tokens: int, keep: Any, fixed: Mapping[str, Any]) -> Iterator[list[Plan]]:
        """Plans that keep the same, in groups of falling chunks; groups from fast to slow, from device to disk.

        Args:
            fixed: keys of the plan that are given.
        """
        chunks: list[int | None] = [None, *(c for c in CHUNKS if c < tokens)]
        if "chunk_tokens" in fixed:
            chunks = [fixed["chunk_tokens"]]
        elif not self.chunkable:
            chunks = [None]
        if keep == "everything" and fixed.get("keep_layers") is None:
            # What is kept is the same for any chunk: smaller ones only bound the temporaries.
            chunks = chunks[:1] + [c for c in chunks[1:] if c in (8192, 1024)]
        heads = [fixed["head_chunk"]] if "head_chunk" in fixed else [HEAD_CHUNK, 256]
        extra = {key: value for key, value in fixed.items() if key not in KEYS}
        for store, segment in self._homes(keep, fixed):
            plans = [
                Plan(
                    chunk_tokens=chunk,
                    layers_per_segment=segment,
                    boundary_store=store,
                    head_chunk=heads[0],
                    keep=keep,
                    **extra,
                )
                for chunk in chunks
            ]
            yield plans + [replace(plans[-1], head_chunk=head) for head in heads[1:]]

    def _homes(self, keep: str, fixed: Mapping[str, Any]) -> Iterator[tuple[Any, int | None]]:
        """Where boundaries live, and how many there are: (store, layers of a segment)."""
        stores = self.stores(fixed)
        if "layers_per_segment" in fixed:
            yield from ((store, fixed["layers_per_segment"]) for store in stores)
        elif keep == "everything" and fixed.get("keep_layers") is None:
            yield stores[0], 1
        else:
            yield from ((store, 1) for store in stores if store != "disk")
            if keep == "nothing":
                few = [s for s in (2, 4, 8) if s < self.layers]
                yield from ((store, segment) for segment in few for store in stores if store != "disk")
            yield from ((store, 1) for store in stores if store == "disk")

    def stores(self, fixed: Mapping[str, Any]) -> list[Any]:
        """Where boundaries may live."""
        if "boundary_store" in fixed:
            return [fixed["boundary_store"]]
        return ["device", "disk"] if self.kind == "cpu" else ["device", "host", "disk"]

    def partly(self, base: Plan, tokens: int, fixed: Mapping[str, Any]) -> Iterator[list[Plan]]:
        """Plans that keep something of the last layers (how many is left open), in groups of falling chunks.

        Args:
            base: the fastest plan of those that keep the same of all layers.
        """

        def given(keep: str) -> bool:
            return fixed.get("keep", keep) == keep

        if given("everything"):
            # What the other layers keep, if that is not given either.
            below = fixed.get("keep_below", base.keep)
            chunks = [base.chunk_tokens]
            if "chunk_tokens" not in fixed and self.chunkable:
                chunks += [c for c in CHUNKS if 2 * _SMALL <= c < min(base.chunk_tokens or tokens, tokens)]
            for store in self.stores(fixed):
                if store != "disk" or base.boundary_store == "disk":
                    plan = replace(base, boundary_store=store, keep="everything", keep_below=below)
                    yield [replace(plan, chunk_tokens=chunk) for chunk in chunks]
        if given("attention") and base.keep == "nothing":
            # Beside boundaries, where these are: elsewhere there was no room for them already.
            yield [replace(base, keep="attention")]

    def tight(self, tokens: int, fixed: Mapping[str, Any]) -> list[Plan]:
        """Plans of little memory: of each ladder but those between, one whose chunks are small beside the row."""
        keep = fixed.get("keep", "nothing")
        if keep in KEEPS[:2] and "keep_layers" not in fixed and self.layers > 1:
            fixed = {**fixed, "keep_layers": 1}
        plans = []
        for ladder in self.ladders(tokens, keep, fixed):
            plan = ladder[-1]
            if "layers_per_segment" not in fixed and plan.layers_per_segment not in (1, 4):
                continue
            if "boundary_store" not in fixed and plan.boundary_store == "device" and self.kind != "cpu":
                continue  # The host takes less of the device.
            chunks = [p.chunk_tokens for p in ladder if p.chunk_tokens]
            small = min((c for c in chunks if c >= _SMALL), default=plan.chunk_tokens)
            plans.append(replace(plan, chunk_tokens=small))
        # One walk serves host and disk; longer segments take longer and more of the device.
        return sorted(plans, key=lambda plan: plan.layers_per_segment or 0)
