"""One training step's walk over the grid of layers x chunks.

    forward   no graph: for each layer, for each chunk: run; keep the input of each segment
    head      log-probs and d(residual), chunk by chunk
    backward  for each segment, last to first: rebuild its inside without graph, then for each layer, last to first,
              for each chunk, last to first: run that one cell with graph and take its gradient

Chunks go backwards in reverse, so the accumulators of a chunk's keys and values are complete when its cell is reached.
Only one cell's graph is alive at a time (all of them under `keep="everything"`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from longtune.attention.function import Cell, StopLayer
from longtune.attention.store import KVStore
from longtune.engine.boundary import Store
from longtune.engine.gradients import GradientSums
from longtune.engine.randomness import cell_randomness, has_dropout
from longtune.model.stack import LayerCall, Prologue
from longtune.tree import Forest

if TYPE_CHECKING:
    from longtune.engine.engine import Engine


Phase = str | tuple[str, int]
"""A part of a walk: prologue, forward, head, ("backward", segment), and done once it is over."""


@dataclass(slots=True)
class _Graph:
    """A cell's graph, from its inputs to its output."""

    inputs: list[torch.Tensor]
    output: torch.Tensor


class Walk:
    """The state of one walk. Use once: `forward`, then the head or `hidden`, then `backward`.

    Args:
        engine: what does not change between walks.
        forest: the row.
        key: (step, micro-batch), for the randomness inside cells.
        grad: whether `backward` will follow.
    """

    def __init__(self, engine: Engine, forest: Forest, key: tuple[int, ...], grad: bool):
        self.engine = engine
        self.stack = engine.stack
        self.plan = engine.plan
        self.forest = forest
        self.key = key
        self.grad = grad
        self.sums = GradientSums()
        self.chunks = forest.chunks(self.plan.chunk_tokens)
        device = self.stack.device
        self._tokens = forest.tokens.to(device)
        self._positions = forest.positions.to(device)
        self._prologues: list[Prologue] = []
        self._flow: list[torch.Tensor] = []
        """Per chunk: the residual on the way forward, its gradient on the way back."""
        self._kv: dict[int, KVStore] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._call_gradients: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        # All that a walk keeps is its own: another one may begin before this one goes back.
        self._store: Store = engine.boundaries.section()
        count = len(self.stack.layers)
        self._random = [has_dropout(layer) for layer in self.stack.layers]
        self._parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in self.stack.layers]
        self.lowest = self._lowest_trained() if grad else count
        step = self.plan.layers_per_segment or count
        self._segments = [range(first, min(first + step, count)) for first in range(self.lowest, count, step)]
        self._outer = [p for p in self.stack.outer_parameters if p.requires_grad] if grad else []
        kind = device.type
        on = kind != "meta" and torch.is_autocast_enabled(kind)
        self._autocast = torch.get_autocast_dtype(kind) if on else None

    def _lowest_trained(self) -> int:
        """The first layer that the backward must reach: 0 where anything before the layers is trained."""
        if any(p.requires_grad for p in self.stack.outer_parameters):
            return 0
        return next((i for i, own in enumerate(self._parameters) if own), len(self.stack.layers))

    def check_modes(self) -> None:
        """Refuse a backward whose recomputed cells would not repeat the dropout of the forward.

        Raises:
            RuntimeError: layers went from training to evaluation mode, or the other way, since the walk began.
        """
        if self._random != [has_dropout(layer) for layer in self.stack.layers]:
            raise RuntimeError(
                "the model changed between training and evaluation mode after a streamed forward with dropout;"
                " run the backward in the mode of its forward"
            )

    def _begins(self, phase: Phase) -> None:
        if self.engine.on_phase is not None:
            self.engine.on_phase(phase)

    # forward

    def forward(self) -> None:
        """Run the prologue and all layers; what the backward needs is kept as the plan says."""
        with self._walking():
            self._begins("prologue")
            for chunk in self.chunks:
                own = slice(chunk.start, chunk.end)
                with torch.set_grad_enabled(bool(self._outer)):
                    prologue = self.stack.prologue(self._tokens[own], self._positions[own])
                self._prologues.append(prologue)
                self._flow.append(prologue.residual.detach())
            self._begins("forward")
            firsts = {segment[0]: number for number, segment in enumerate(self._segments)}
            for layer in range(len(self.stack.layers)):
                self._forward_layer(layer, firsts.get(layer))

    def _forward_layer(self, layer: int, segment: int | None) -> None:
        everything = self.plan.keep == "everything" and layer >= self.lowest
        for c in range(len(self.chunks)):
            hidden = self._flow[c]
            if everything:
                graph = self._cell_graph(layer, c, hidden)
                self._graphs[layer, c] = graph
                self._flow[c] = graph.output.detach()
                continue
            if segment is not None:
                self._store.put(("boundary", segment, c), hidden)
            keeps = self.plan.keep == "attention" and layer >= self.lowest
            with torch.no_grad():
                self._flow[c] = self._run(layer, c, hidden, keeps=keeps)
        self._forget_kv(layer, everything)

    def _forget_kv(self, layer: int, everything: bool) -> None:
        """Drop the keys and values that no later layer, and no backward, will ask for."""
        for donor in list(self._kv):
            last = self.engine.structure.last_reader(donor)
            read_backwards = last >= self.lowest and (everything or last > donor)
            if layer >= last and not read_backwards:
                del self._kv[donor]

    # one cell

    def _cell(self, layer: int, c: int, **options: object) -> Cell:
        donor = self.engine.structure.donors[layer]
        home = layer if donor is None else donor
        store = self._kv.get(home)
        if store is None:
            store = self._kv[home] = KVStore(self.forest.size)
        return Cell(layer, self.chunks[c], store, writes=home == layer, **options)  # pyright: ignore[reportArgumentType]

    def _run(
        self, layer: int, c: int, hidden: torch.Tensor, *, call: LayerCall | None = None, keeps: bool = False
    ) -> torch.Tensor:
        """Run one layer on one chunk, in the ambient gradient mode."""
        cell = self._cell(layer, c, kept=self._kept.get((layer, c)))
        if keeps:

            def keep(out: torch.Tensor, lse: torch.Tensor) -> None:
                self._store.put(("out", layer, c), out)
                self._store.put(("lse", layer, c), lse)

            cell.keep = keep
        self.engine.port.cell = cell
        with self._randomness(layer, c):
            return self.stack.layer(layer, hidden, call or self._prologues[c].calls[layer])

    def _rebuild_kv(self, layer: int, c: int, hidden: torch.Tensor) -> None:
        """Run a layer only as far as its keys and values."""
        self.engine.port.cell = self._cell(layer, c, stop=True)
        with torch.no_grad(), self._randomness(layer, c):
            try:
                self.stack.layer(layer, hidden, self._prologues[c].calls[layer])
            except StopLayer:
                pass

    def _randomness(self, layer: int, c: int):
        if not self._random[layer]:
            return nullcontext()
        return cell_randomness(self.stack.device, self.engine.seed, *self.key, layer, c)

    def _cell_graph(self, layer: int, c: int, hidden: torch.Tensor) -> _Graph:
        """Run one cell with graph."""
        leaf = hidden.detach()
        if layer > self.lowest or self._outer:
            leaf.requires_grad_()
        call = self._prologues[c].calls[layer]
        arguments = self.stack.tensors(call) if self._outer else []
        leaves = [argument.detach().requires_grad_() for argument in arguments]
        if leaves:
            call = self.stack.with_tensors(call, leaves)
        with torch.enable_grad():
            output = self._run(layer, c, leaf, call=call)
        return _Graph([leaf, *leaves], output)

    # head

    def _targets_by_chunk(self) -> list[torch.Tensor]:
        """Per chunk, the indices of its targets."""
        starts = torch.tensor([chunk.start for chunk in self.chunks])
        home = torch.bucketize(self.forest.targets.hidden, starts, right=True) - 1
        return [(home == c).nonzero().flatten() for c in range(len(self.chunks))]

    def log_probs(self) -> torch.Tensor:
        """Log-probs of all targets [M], fp32, without gradient; the walk can still go on to `head`."""
        targets = self.forest.targets
        out = torch.zeros(len(targets), dtype=self.engine.wide_dtype, device=self.stack.device)
        with self._walking(), torch.no_grad():
            for c, index in enumerate(self._targets_by_chunk()):
                if index.numel():
                    hidden = self._epilogue(c, self._flow[c])[0]
                    column = (targets.hidden[index] - self.chunks[c].start).to(hidden.device)
                    token = targets.token[index].to(hidden.device)
                    out[index.to(out.device)] = self.engine.head.log_probs(hidden[column], token)
        return out

    def head(self, cotangent_M: torch.Tensor) -> torch.Tensor:
        """Log-probs of all targets [M]; the flow turns from residuals to their gradients."""
        targets = self.forest.targets
        head = self.engine.head
        out = torch.zeros(len(targets), dtype=self.engine.wide_dtype, device=self.stack.device)
        self._begins("head")
        with self._walking():
            for c, index in enumerate(self._targets_by_chunk()):
                if not index.numel():
                    self._flow[c] = torch.zeros_like(self._flow[c])
                    continue
                residual, hidden = self._epilogue_graph(c)
                column = (targets.hidden[index] - self.chunks[c].start).to(hidden.device)
                token = targets.token[index].to(hidden.device)
                cotangent = cotangent_M[index].to(hidden.device)
                with torch.no_grad():
                    log_probs, drows, grads = head.backward(hidden.detach()[0, column], token, cotangent)
                    wide = torch.zeros_like(hidden[0], dtype=self.engine.wide_dtype)
                    dhidden = wide.index_add_(0, column, drows.to(wide.dtype)).to(hidden.dtype)
                    del wide
                out[index.to(out.device)] = log_probs
                self.sums.add(head.parameters, grads)
                self._epilogue_backward(c, residual, hidden, dhidden[None])
        return out

    def hidden(self) -> torch.Tensor:
        """Hidden states before the head, [T, H], without graph."""
        with self._walking(), torch.no_grad():
            return torch.cat([self._epilogue(c, self._flow[c])[0] for c in range(len(self.chunks))])

    def from_hidden(self, dhidden_TH: torch.Tensor) -> None:
        """Turn the flow from the gradient of `hidden()`."""
        with self._walking():
            for c, chunk in enumerate(self.chunks):
                residual, hidden = self._epilogue_graph(c)
                self._epilogue_backward(c, residual, hidden, dhidden_TH[None, chunk.start : chunk.end])

    def _epilogue(self, c: int, residual: torch.Tensor) -> torch.Tensor:
        own = slice(self.chunks[c].start, self.chunks[c].end)
        return self.stack.epilogue(self._tokens[own], self._positions[own], residual)

    def _epilogue_graph(self, c: int) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self._flow[c].detach().requires_grad_()
        with torch.enable_grad():
            return residual, self._epilogue(c, residual)

    def _epilogue_backward(self, c: int, residual: torch.Tensor, hidden: torch.Tensor, dhidden: torch.Tensor) -> None:
        grads = torch.autograd.grad(hidden, [residual, *self._outer], dhidden, allow_unused=True)
        assert grads[0] is not None
        self._flow[c] = grads[0]
        self.sums.add(self._outer, grads[1:])

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply everything that the backward starts from (between the head and the backward)."""
        self._flow = [flow * factor.to(flow.dtype) for flow in self._flow]
        self.sums.scale(factor)

    # backward

    def backward(self) -> None:
        """Walk back; the gradients are in `sums` afterwards."""
        with self._walking():
            for number in range(len(self._segments) - 1, -1, -1):
                self._begins(("backward", number))
                if self.plan.keep == "everything":
                    for layer in reversed(self._segments[number]):
                        self._backward_layer(layer, None)
                else:
                    self._backward_segment(number)
            if self._outer:
                self._backward_prologue()
            self._flow.clear()
            self._prologues.clear()
        self._begins("done")

    def _fetch(self, number: int) -> None:
        if number >= 0:
            for c in range(len(self.chunks)):
                self._store.fetch(("boundary", number, c))

    def _backward_segment(self, number: int) -> None:
        segment = self._segments[number]
        chunks = range(len(self.chunks))
        inputs = {segment[0]: [self._store.take(("boundary", number, c)) for c in chunks]}
        self._fetch(number - 1)
        for layer in segment:
            if self.plan.keep == "attention" and self.engine.structure.donors[layer] is not None:
                for c in chunks:
                    self._kept[layer, c] = (self._store.take(("out", layer, c)), self._store.take(("lse", layer, c)))
            if layer == segment[-1]:
                # The last chunk's cell comes first on the way back and writes its own keys and values.
                if self.engine.structure.donors[layer] == layer and layer not in self._kv:
                    for c in chunks[:-1]:
                        self._rebuild_kv(layer, c, inputs[layer][c])
            else:
                with torch.no_grad():
                    inputs[layer + 1] = [self._run(layer, c, inputs[layer][c]) for c in chunks]
        for layer in reversed(segment):
            self._backward_layer(layer, inputs.pop(layer))

    def _backward_layer(self, layer: int, inputs: list[torch.Tensor] | None) -> None:
        parameters = self._parameters[layer]
        for c in range(len(self.chunks) - 1, -1, -1):
            if inputs is None:
                graph = self._graphs.pop((layer, c))
            else:
                graph = self._cell_graph(layer, c, inputs.pop())
            wanted = [x for x in graph.inputs if x.requires_grad]
            grads = torch.autograd.grad(graph.output, [*wanted, *parameters], self._flow[c], allow_unused=True)
            self._kept.pop((layer, c), None)
            if graph.inputs[0].requires_grad:
                dinput = grads[0]
                assert dinput is not None
                self._flow[c] = dinput
            if self._outer:
                self._call_gradients[layer, c] = list(grads[1 : len(wanted)])
            self.sums.add(parameters, grads[len(wanted) :])
            del graph, grads
        self._kv.pop(layer, None)

    def _backward_prologue(self) -> None:
        """Gradients of trained parameters before and beside the layers, through what the prologue recorded."""
        for c, prologue in enumerate(self._prologues):
            outputs, doutputs = [prologue.residual], [self._flow[c]]
            for layer in range(self.lowest, len(self.stack.layers)):
                tensors = self.stack.tensors(prologue.calls[layer])
                for tensor, dtensor in zip(tensors, self._call_gradients.pop((layer, c)), strict=True):
                    if dtensor is not None:
                        outputs.append(tensor)
                        doutputs.append(dtensor)
            pairs = [(o, d) for o, d in zip(outputs, doutputs, strict=True) if o.requires_grad]
            if pairs:
                grads = torch.autograd.grad(
                    [o for o, _ in pairs], self._outer, [d for _, d in pairs], allow_unused=True
                )
                self.sums.add(self._outer, grads)

    # context

    @contextmanager
    def _walking(self) -> Iterator[None]:
        """The model attends through this engine, under the autocast that was on when the walk began."""
        kind = self.stack.device.type
        autocast = (
            nullcontext()
            if self._autocast is None
            # A cast cached without graph would be reused with graph, and lose its gradient.
            else torch.autocast(kind, dtype=self._autocast, cache_enabled=False)
        )
        last = int(self.forest.positions.max())
        with self.stack.attending(self.engine.port.name), self.stack.rope.row(last), autocast:
            try:
                yield
            except BaseException:
                self._store.clear()
                raise
            finally:
                self.engine.port.cell = None
