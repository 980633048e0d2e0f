"""The cells of one walk: one layer on one chunk, run without a graph, as far as its keys and values, or with gradients.

Which cell runs when is the business of `walk.py`; where its input comes from that of `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from longtune.attention.function import Cell, Reached, StopLayer, backward_through
from longtune.attention.store import KVStore
from longtune.engine.layers import Layers
from longtune.engine.randomness import cell_randomness
from longtune.engine.traffic import Traffic
from longtune.engine.unread import left_out
from longtune.model.stack import Compiling, LayerCall
from longtune.tree import Chunk, Forest

if TYPE_CHECKING:
    from longtune.engine.engine import Engine

Attention = tuple[torch.Tensor, torch.Tensor]
"""Attention output and log-sum-exp of a cell."""


@dataclass(slots=True)
class Graph:
    """A cell's graph, from its inputs (the hidden states, then trained arguments) to its output."""

    inputs: list[torch.Tensor]
    output: torch.Tensor


class Cells:
    """Runs cells.

    Args:
        engine: what does not change between walks.
        forest: the row.
        chunks: of the row.
        key: (step, micro-batch), for the randomness inside cells.
        layers: whether something in a layer is random.
        lowest: the first layer that the backward reaches.
        arguments: whether tensors that the prologue hands to the layers are trained through.
        traffic: where the layers' arguments are.

    Attributes:
        kv: keys and values by the layer that makes them.
    """

    def __init__(
        self,
        engine: Engine,
        forest: Forest,
        chunks: tuple[Chunk, ...],
        key: tuple[int, ...],
        layers: Layers,
        lowest: int,
        arguments: bool,
        traffic: Traffic,
    ):
        self.engine = engine
        self.stack = engine.stack
        self.forest = forest
        self.chunks = chunks
        self.key = key
        self.layers = layers
        self.lowest = lowest
        self.arguments = arguments
        self.traffic = traffic
        self.kv: dict[int, KVStore] = {}

    def _cell(self, layer: int, c: int, **options: object) -> Cell:
        donor = self.engine.structure.donors[layer]
        home = layer if donor is None else donor
        store = self.kv.get(home)
        if store is None:
            store = self.kv[home] = KVStore(self.forest.size)
        return Cell(layer, self.chunks[c], store, writes=home == layer, **options)  # pyright: ignore[reportArgumentType]

    def _run(self, cell: Cell, hidden: torch.Tensor, call: LayerCall, compiled: Compiling = "no") -> torch.Tensor:
        layer, c = cell.layer, cell.chunk.index
        cell.dense = compiled == "any size"
        self.engine.port.cell = cell
        random = (
            cell_randomness(self.stack.device, self.engine.seed, *self.key, layer, c)
            if self.layers[layer].random
            else nullcontext()
        )
        with random:
            return self.stack.layer(layer, hidden, call, compiled)

    def _compiles(self, layer: int, c: int) -> Compiling:
        """How a cell is compiled: not where something is random, which would differ between the cell with a graph and
        the one without. Chunks of the plan's size are compiled for it. Rows of one chunk, which come in all sizes, are
        compiled once for all of them; the odd last chunk of a longer row isn't worth it."""
        if not self.engine.compile or self.layers[layer].random:
            return "no"
        if self.chunks[c].size == self.engine.plan.chunk_tokens:
            return "size"
        return "any size" if len(self.chunks) == 1 else "no"

    def run(
        self, layer: int, c: int, hidden: torch.Tensor, *, keeps: bool = False, kept: Attention | None = None
    ) -> torch.Tensor:
        """The output of a cell, without a graph.

        Args:
            keeps: put the attention's output away for the backward.
            kept: the attention's output, from an earlier run.
        """
        cell = self._cell(layer, c, kept=kept)
        if keeps:
            cell.keep = lambda out, lse: self.traffic.put_attention(layer, c, out, lse)
        with torch.no_grad():
            return self._run(cell, hidden, self.traffic.call(layer, c), self._compiles(layer, c))

    def rebuild_kv(self, layer: int, c: int, hidden: torch.Tensor) -> None:
        """Run a layer only as far as its keys and values."""
        with torch.no_grad():
            try:
                self._run(self._cell(layer, c, stop=True), hidden, self.traffic.call(layer, c))
            except StopLayer:
                pass

    def _leaves(self, layer: int, c: int, hidden: torch.Tensor) -> tuple[list[torch.Tensor], LayerCall]:
        """Detached inputs of a cell, and its arguments made of them."""
        inputs = [hidden.detach().requires_grad_(layer > self.lowest or self.arguments)]
        call = self.traffic.call(layer, c)
        if self.arguments:
            inputs += [argument.detach().requires_grad_() for argument in self.stack.tensors(call)]
            call = self.stack.with_tensors(call, inputs[1:])
        return inputs, call

    def graph(
        self, layer: int, c: int, hidden: torch.Tensor, kept: Attention | None = None, *, read: bool = True
    ) -> Graph:
        """Run a cell with a graph from detached inputs.

        Args:
            kept: the attention's output, from an earlier run.
            read: whether the output's values are wanted, not only gradients.
        """
        inputs, call = self._leaves(layer, c, hidden)
        cell = self._cell(layer, c, kept=kept)
        names: tuple[str, ...] = ()
        if not read:
            unread = self.engine.unread[layer]
            names = unread.stored if cell.store.has(cell.chunk) else unread.fresh
        with torch.enable_grad(), left_out(self.stack.layers[layer], names):
            return Graph(inputs, self._run(cell, inputs[0], call, self._compiles(layer, c)))

    @staticmethod
    def gradients(graph: Graph, doutput: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of a graph's inputs, then of `parameters`; None where there is none."""
        return _gradients([graph.output], [doutput], [*graph.inputs, *parameters])

    def gradients_in_halves(
        self,
        layer: int,
        c: int,
        hidden: torch.Tensor,
        kept: Attention | None,
        doutput: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """As `graph` and `gradients`, with the graphs behind and before the attention call alive one after the other.

        Behind it, the layer goes on from the attention's output as a leaf. Before it, the layer is run again as far as
        its queries, keys and values.
        """
        inputs, call = self._leaves(layer, c, hidden)
        wanted = [*inputs, *parameters]
        cell = self._cell(layer, c, kept=kept, cut=True)
        with torch.enable_grad():
            output = self._run(cell, inputs[0], call)
        assert cell.reached is not None
        out, lse = cell.reached.tensors
        dout, *behind = _gradients([output], [doutput], [out, *wanted])
        del output
        if dout is None:
            return behind
        cell = self._cell(layer, c, stop=True, cut=True)
        with torch.enable_grad():
            try:
                self._run(cell, inputs[0], call)
            except StopLayer:
                pass
        reached: Reached | None = cell.reached
        assert reached is not None
        attention = self.engine.port.attention
        with torch.no_grad():
            found = backward_through(attention, cell, reached.score, dout, reached.tensors[0], out.detach(), lse)
        pairs = [(x, d.to(x.dtype)) for x, d in zip(reached.tensors, found, strict=True) if d is not None]
        before = _gradients([x for x, _ in pairs], [d for _, d in pairs], wanted)
        return [b if a is None else a if b is None else a + b for a, b in zip(behind, before, strict=True)]


def _gradients(
    outputs: list[torch.Tensor], doutputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of all inputs; None for those that have none (or want none)."""
    wanted = [x for x in inputs if x.requires_grad]
    trained = [(y, d) for y, d in zip(outputs, doutputs, strict=True) if y.requires_grad]
    if not wanted or not trained:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([y for y, _ in trained], wanted, [d for _, d in trained], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]
