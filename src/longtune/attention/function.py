"""The attention function that an unmodified transformers model calls, and the cell that it works for.

Each `AttentionPort` registers one entry in transformers' `AttentionInterface` under a name of its own, so engines never
meet; models are pointed at it only while their engine walks. The cell in work (layer, chunk, KV store) is set on
the port by the engine.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from longtune.attention.path import PathAttention, Score
from longtune.attention.store import KVStore
from longtune.errors import Problem, UserError
from longtune.tree import Chunk

_NUMBERS = itertools.count()


class StopLayer(Exception):
    """Leaves a layer at its attention call: the keys and values are written, the rest is not wanted."""


@dataclass(slots=True)
class Reached:
    """An attention call: how it scores; output and log-sum-exp behind it, or queries, keys and values before it."""

    score: Score
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Cell:
    """One (layer, chunk) in work.

    Attributes:
        layer: index of the layer.
        chunk: the chunk.
        store: the KV store to read (the donor's for a sharer).
        writes: whether the layer has keys and values of its own (False for a sharer).
        stop: leave the layer once its keys and values are written.
        kept: attention output [1, H, C, E] and log-sum-exp [1, H, C] of an earlier run, used instead of computing them.
        keep: called with output and log-sum-exp when they are computed.
        cut: let the layer go on from the attention's output as a leaf of its own, noted in `reached`; with `stop`, note
            the queries, keys and values (with their graph) there and leave.
        reached: what the attention call met, where the cell is cut.
        dense: gradients of queries, keys and values are wanted contiguous [1, H, C, D] (a layer that is compiled for
            any size would copy others).
    """

    layer: int
    chunk: Chunk
    store: KVStore
    writes: bool = True
    stop: bool = False
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    cut: bool = False
    reached: Reached | None = None
    dense: bool = False


@dataclass(frozen=True, slots=True)
class _Layout:
    """Dtype of keys or values and, where they are dense, the order of their axes in memory.

    Their gradients come token-major. What made them goes on with gradients laid out as they were; a compiled layer
    would copy others first.
    """

    dtype: torch.dtype
    strides: tuple[int, ...] | None

    @staticmethod
    def of(x: torch.Tensor, contiguous: bool) -> _Layout:
        like = torch.empty_like(
            x, device="meta", memory_format=torch.contiguous_format if contiguous else torch.preserve_format
        )
        return _Layout(x.dtype, like.stride() if contiguous or like.stride() == x.stride() else None)

    def cast(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient in this dtype; in this layout too where it must be copied anyhow."""
        if self.strides is None or gradient.dtype == self.dtype:
            return gradient.to(self.dtype)
        made = torch.empty_strided(gradient.shape, self.strides, dtype=self.dtype, device=gradient.device)
        return made.copy_(gradient)


class _PathAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, attention: PathAttention, cell: Cell, score: Score):
        out, lse = cell.kept or attention.forward(q, cell.store, cell.chunk, score)
        ctx.save_for_backward(q, out, lse)
        # Not the cell itself: it holds what was kept, and callbacks into the walk.
        ctx.attention, ctx.score = attention, score
        ctx.cell = Cell(cell.layer, cell.chunk, cell.store, cell.writes, dense=cell.dense)
        ctx.own = None if k is None else (_Layout.of(k, cell.dense), _Layout.of(v, cell.dense))
        if cell.keep is not None:
            cell.keep(out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, out, lse = ctx.saved_tensors
        dq, dk, dv = backward_through(ctx.attention, ctx.cell, ctx.score, dout, q, out, lse)
        if dk is None or dv is None:
            return dq, None, None, None, None, None
        return dq, ctx.own[0].cast(dk), ctx.own[1].cast(dv), None, None, None


def backward_through(
    attention: PathAttention,
    cell: Cell,
    score: Score,
    dout_BHCE: torch.Tensor,
    q_BHCD: torch.Tensor,
    out_BHCE: torch.Tensor,
    lse_BHC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dQ and, of a layer with keys and values of its own, the accumulated dK and dV of its chunk."""
    layout = torch.contiguous_format if cell.dense else torch.preserve_format
    dq = attention.backward(dout_BHCE, q_BHCD, out_BHCE, lse_BHC, cell.store, cell.chunk, score, layout)
    return (dq, *cell.store.gradients(cell.chunk)) if cell.writes else (dq, None, None)


Probe = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any, Score], torch.Tensor]


class AttentionPort:
    """The place where a model's attention calls arrive.

    Args:
        attention: computes them.

    Attributes:
        name: the name registered with transformers (no mask is ever made for it).
        cell: the cell in work.
        probe: when set, receives the calls instead (used once, to learn a model's structure).
    """

    def __init__(self, attention: PathAttention):
        self.attention = attention
        self.cell: Cell | None = None
        self.probe: Probe | None = None
        self.name = f"longtune-{next(_NUMBERS)}"
        self_ref = weakref.ref(self)

        # A compiled layer leaves its graph here: what a cell reads and writes is none of a compiler's business.
        @torch.compiler.disable
        def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
            port = self_ref()
            assert port is not None, "the engine of this attention was closed"
            return port(*args, **kwargs)

        AttentionInterface.register(self.name, call)
        self._finalizer = weakref.finalize(self, AttentionInterface._global_mapping.pop, self.name, None)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Take the entry out of transformers' registry."""
        self._finalizer()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention signature; query [1, H, C, D], key [1, K, C, D], value [1, K, C, E]; returns the
        output [1, C, H, E] and no weights."""
        if dropout:
            raise UserError(
                Problem(
                    type(module).__name__,
                    f"attention dropout is {dropout}; dropout inside attention is not supported",
                    "set attention_dropout to 0 in the model's config",
                )
            )
        for name in ("position_bias", "alibi", "indices"):
            if kwargs.get(name) is not None:
                raise UserError(Problem(type(module).__name__, f"attention with `{name}` is not supported"))
        if s_aux is not None and s_aux.requires_grad:
            raise UserError(
                Problem(type(module).__name__, "trainable attention sinks are not supported", "freeze them")
            )
        kind = query.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            # As autocast does for scaled_dot_product_attention, which this call takes the place of.
            query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        score = Score(scale, softcap, sliding_window, s_aux)
        if self.probe is not None:
            return self.probe(module, query, key, value, attention_mask, score).contiguous(), None
        cell = self.cell
        assert cell is not None, "attention was called outside a walk"
        if cell.writes:
            cell.store.write(cell.chunk, key, value)
        if cell.stop:
            if cell.cut:
                cell.reached = Reached(score, (query, key, value))
            raise StopLayer
        if cell.cut:
            with torch.no_grad():
                out, lse = cell.kept or self.attention.forward(query, cell.store, cell.chunk, score)
            leaf = out.detach().requires_grad_()
            cell.reached = Reached(score, (leaf, lse))
            return leaf.transpose(1, 2).contiguous(), None
        own = (key, value) if cell.writes else (None, None)
        out = _PathAttentionFunction.apply(query, *own, self.attention, cell, score)
        # Contiguous as in transformers' own attention: some models take a view of it.
        return out.transpose(1, 2).contiguous(), None
