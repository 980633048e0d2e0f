"""One training step's walk over the grid of layers x chunks.

    forward   no graph: for each layer, for each chunk: run; keep the input of each segment
    head      log-probs and d(residual), chunk by chunk
    backward  for each segment, last to first: rebuild its inside without graph, then for each layer, last to first,
              for each chunk, last to first: run that one cell with graph and take its gradient

Chunks go backwards in reverse, so the accumulators of a chunk's keys and values are complete when its cell is reached.
Only one cell's graph is alive at a time, apart from layers of which the plan keeps everything. `cells.py` runs cells;
what they read and write besides keys and values passes through `traffic.py`, which knows what lives where.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from longtune.attention.store import KVStore
from longtune.engine.cells import Cells, Graph
from longtune.engine.gradients import GradientSums
from longtune.engine.layers import Layers
from longtune.engine.traffic import Place, Traffic
from longtune.engine.unread import NOTHING, Unread, find_unread
from longtune.tree import Forest

if TYPE_CHECKING:
    from longtune.engine.engine import Engine

Groups = list[list[Place]]
"""What the walk will ask for, one piece of work after another."""


class Targeted(NamedTuple):
    """Targets of a chunk, int64 [m] each: their indices among the row's, columns in the chunk, and tokens."""

    index: torch.Tensor
    column: torch.Tensor
    token: torch.Tensor


UNIT_BYTES = 256 << 20
"""Most bytes of d(hidden) by target that a walk holds between its log-probs and its backward."""

_NO_GROUPS: Groups = []
_REBUILT_AHEAD = 3
"""Chunks on their way while keys and values are rebuilt: that takes a chunk less time than its copy."""


class Walk:
    """The state of one walk. Use once: `forward`, then the head or `hidden`, then `backward`.

    Args:
        engine: what does not change between walks.
        forest: the row.
        key: (step, micro-batch), for the randomness inside cells.
        grad: whether `backward` will follow.

    Attributes:
        recomputes: whether its backward runs cells again.
    """

    def __init__(self, engine: Engine, forest: Forest, key: tuple[int, ...], grad: bool):
        self.engine = engine
        self.stack = engine.stack
        self.plan = engine.plan
        self.forest = forest
        self.sums = GradientSums()
        self.chunks = forest.chunks(self.plan.chunk_tokens)
        device = self.stack.device
        self._tokens = forest.tokens.to(device)
        self._positions = forest.positions.to(device)
        self._grad = grad
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._units: dict[int, torch.Tensor] = {}
        """By chunk, d(hidden) of each target for a cotangent of one [m, H]."""
        self._log_probs: torch.Tensor | None = None
        """Those that were made together with the units."""
        self._call_gradients: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._count = len(self.stack.layers)
        self._layers = Layers(self.stack.layers)
        self._outer = [p for p in self.stack.outer_parameters if p.requires_grad] if grad else []
        self.lowest = self._lowest_trained() if grad else self._count
        self._keeping = max(self.lowest, self._count - (self.plan.keep_layers or self._count))
        """The first layer that keeps what `keep` says; those below it keep what `keep_below` says."""
        self._whole = self._keeping if self.plan.keep == "everything" else self._count
        """The first layer of which all activations are kept."""
        step = self.plan.layers_per_segment or self._count
        self._segments = [range(i, min(i + step, self._whole)) for i in range(self.lowest, self._whole, step)]
        self.recomputes = bool(self._segments)
        # All that a walk keeps is its own: another one may begin before this one goes back.
        firsts = [segment[0] for segment in self._segments]
        near = self._whole if self._whole < self._count else self._count + 1
        self._traffic = Traffic(self.plan, engine.boundaries, engine.moving, len(self.chunks), firsts, near)
        self.cells = Cells(
            engine, forest, self.chunks, key, self._layers, self.lowest, bool(self._outer), self._traffic
        )
        kind = device.type
        on = kind != "meta" and torch.is_autocast_enabled(kind)
        self._autocast = torch.get_autocast_dtype(kind) if on else None

    def _lowest_trained(self) -> int:
        """The first layer that the backward must reach: 0 where anything before the layers is trained."""
        if self._outer:
            return 0
        return next((i for i in range(self._count) if self._layers[i].trained), self._count)

    def check_modes(self) -> None:
        """Refuse a backward whose recomputed cells would not repeat the dropout of the forward.

        Raises:
            RuntimeError: layers went from training to evaluation mode, or the other way, since the walk began.
        """
        if self._layers.changed:
            raise RuntimeError(
                "the model changed between training and evaluation mode after a streamed forward with dropout;"
                " run the backward in the mode of its forward"
            )

    def _keep(self, layer: int) -> str:
        return self.plan.keep if layer >= self._keeping else self.plan.keep_below

    # forward

    def forward(self) -> None:
        """Run the prologue and all layers; what the backward needs is kept as the plan says."""
        _ = self._targets  # Sent before the device has work to do.
        with self._walking():
            for c, chunk in enumerate(self.chunks):
                own = slice(chunk.start, chunk.end)
                with torch.set_grad_enabled(bool(self._outer)):
                    prologue = self.stack.prologue(self._tokens[own], self._positions[own])
                self._traffic.begin(c, prologue, trained=bool(self._outer))
                del prologue
            self._told("prologue")
            for layer in range(self._count):
                self._forward_layer(layer)
            self._told("forward")

    def _forward_layer(self, layer: int) -> None:
        keep = self._keep(layer)
        with self.engine.layer_open(layer):
            then = [self._traffic.places(0, entering=layer + 1)]
            for c in self._traffic.ahead(range(len(self.chunks)), entering=layer, then=then):
                hidden = self._traffic.enter(layer, c)
                if keep == "everything":
                    graph = self.cells.graph(layer, c, hidden)
                    self._graphs[layer, c] = graph
                    self._traffic.leave(layer, c, graph.output.detach())
                else:
                    self._traffic.leave(layer, c, self.cells.run(layer, c, hidden, keeps=keep == "attention"))
        if keep == "kv" and self.engine.structure.donors[layer] == layer:
            self._traffic.put_kv(layer, *self.cells.kv[layer].keys_and_values)
        self._forget_kv(layer)

    def _forget_kv(self, layer: int) -> None:
        """Drop the keys and values that no later layer, and no backward, will ask for."""
        for donor in list(self.cells.kv):
            last = self.engine.structure.last_reader(donor)
            read_backwards = last >= self.lowest and (last >= self._whole or last > donor)
            if layer >= last and not read_backwards:
                del self.cells.kv[donor]

    # head

    @cached_property
    def _targets(self) -> list[Targeted]:
        """Per chunk, its targets, on the device: what the host sends later would wait for the device's work."""
        targets = self.forest.targets
        starts = torch.tensor([chunk.start for chunk in self.chunks])
        home = torch.bucketize(targets.hidden, starts, right=True) - 1
        order = torch.argsort(home, stable=True)
        counts = torch.bincount(home, minlength=len(self.chunks)).tolist()
        column = (targets.hidden - starts[home])[order]
        sent = (x.to(self.stack.device).split(counts) for x in (order, column, targets.token[order]))
        return [Targeted(*own) for own in zip(*sent, strict=True)]

    def log_probs(self) -> torch.Tensor:
        """Log-probs of all targets [M], fp32, without gradient; the walk can still go on to `head`.

        A target's part of d(hidden) is its cotangent times a row that doesn't depend on it. Where such rows of all
        targets take few bytes they are made in the same pass, and `head` needs no products of its own.
        """
        targets = self.forest.targets
        both = self._grad and not self.engine.head.parameters and self._row_bytes <= UNIT_BYTES
        out = torch.zeros(len(targets), dtype=self.engine.wide_dtype, device=self.stack.device)
        with self._walking(), torch.no_grad():
            some = [c for c, own in enumerate(self._targets) if own.index.numel()]
            for c in self._traffic.ahead(some, flow=self._count):
                index, column, token = self._targets[c]
                hidden = self._epilogue(c, self._traffic.flow(self._count, c, last=False))[0]
                if both:
                    ones = torch.ones_like(token, dtype=out.dtype)
                    log_probs, self._units[c], _ = self.engine.head.backward(hidden[column], token, ones)
                else:
                    log_probs = self.engine.head.log_probs(hidden[column], token)
                out[index] = log_probs
        self._log_probs = out if both else None
        self._told("head")
        return out

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row of d(hidden) for each target."""
        width = self.stack.model.config.get_text_config().hidden_size
        return len(self.forest.targets) * width * self.stack.dtype.itemsize

    def head(self, cotangent_M: torch.Tensor) -> torch.Tensor:
        """Log-probs of all targets [M]; the flow turns from residuals to their gradients."""
        targets = self.forest.targets
        head = self.engine.head
        known = self._log_probs
        out = torch.zeros(len(targets), dtype=self.engine.wide_dtype, device=self.stack.device)
        with self._walking():
            cotangent_M = cotangent_M.to(self.stack.device)
            for c in self._traffic.ahead(range(len(self.chunks)), flow=self._count, then=self._after_head()):
                index, column, token = self._targets[c]
                if not index.numel():
                    flow = self._traffic.flow(self._count, c)
                    self._traffic.turn(self._count, c, torch.zeros_like(flow))
                    continue
                residual, hidden = self._epilogue_graph(c)
                cotangent = cotangent_M[index]
                with torch.no_grad():
                    if known is None:
                        log_probs, drows, grads = head.backward(hidden.detach()[0, column], token, cotangent)
                        out[index] = log_probs
                        self.sums.add(head.parameters, grads)
                    else:
                        drows = self._units.pop(c).to(self.engine.wide_dtype) * cotangent[:, None]
                    wide = torch.zeros_like(hidden[0], dtype=self.engine.wide_dtype)
                    dhidden = wide.index_add_(0, column, drows.to(wide.dtype)).to(hidden.dtype)
                    del wide
                self._epilogue_backward(c, residual, hidden, dhidden[None])
                del residual, hidden, dhidden, drows
        self._told("head")
        return out if known is None else known

    def hidden(self) -> torch.Tensor:
        """Hidden states before the head, [T, H], without graph."""
        chunks = range(len(self.chunks))
        with self._walking(), torch.no_grad():
            ahead = self._traffic.ahead(chunks, flow=self._count)
            return torch.cat([self._epilogue(c, self._traffic.flow(self._count, c, last=False))[0] for c in ahead])

    def from_hidden(self, dhidden_TH: torch.Tensor) -> None:
        """Turn the flow from the gradient of `hidden()`."""
        with self._walking():
            for c in self._traffic.ahead(range(len(self.chunks)), flow=self._count, then=self._after_head()):
                chunk = self.chunks[c]
                residual, hidden = self._epilogue_graph(c)
                self._epilogue_backward(c, residual, hidden, dhidden_TH[None, chunk.start : chunk.end])

    def _epilogue(self, c: int, residual: torch.Tensor) -> torch.Tensor:
        own = slice(self.chunks[c].start, self.chunks[c].end)
        return self.stack.epilogue(self._tokens[own], self._positions[own], residual)

    def _epilogue_graph(self, c: int) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self._traffic.flow(self._count, c).detach().requires_grad_()
        with torch.enable_grad():
            return residual, self._epilogue(c, residual)

    def _epilogue_backward(self, c: int, residual: torch.Tensor, hidden: torch.Tensor, dhidden: torch.Tensor) -> None:
        grads = torch.autograd.grad(hidden, [residual, *self._outer], dhidden, allow_unused=True)
        assert grads[0] is not None
        self._traffic.turn(self._count, c, grads[0])
        self.sums.add(self._outer, grads[1:])

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply everything that the backward starts from (between the head and the backward)."""
        for c in range(len(self.chunks)):
            flow = self._traffic.flow(self._count, c)
            self._traffic.turn(self._count, c, flow * factor.to(flow.dtype))
        self.sums.scale(factor)

    def unread(self) -> tuple[Unread, ...]:
        """Per layer, what its cells may leave out; instead of a backward, and of what comes before it."""
        self.forward()
        with self._walking():
            found = [
                find_unread(self.cells, layer, self._traffic.input(layer, 0), self._layers[layer].trained)
                for layer in range(self.lowest, self._count)
            ]
            self._traffic.clear()
        return (*(NOTHING for _ in range(self.lowest)), *found)

    # backward

    def backward(self) -> None:
        """Walk back; the gradients are in `sums` afterwards."""
        with self._walking():
            for layer in range(self._count - 1, self._whole - 1, -1):
                below = self._segments and layer == self._whole
                self._backward_layer(layer, self._start(self._segments[-1]) if below else _NO_GROUPS)
                self._told("backward", layer)
            for number in range(len(self._segments) - 1, -1, -1):
                self._backward_segment(self._segments[number])
                self._told("backward", self._segments[number][0])
            if self._outer:
                self._backward_prologue()
            self._traffic.clear()
        self._told("done")

    def _backward_segment(self, segment: range) -> None:
        chunks = range(len(self.chunks))
        for layer in segment:
            own = self.engine.structure.donors[layer] == layer
            if self._keep(layer) == "kv" and own and layer not in self.cells.kv:
                self.cells.kv[layer] = KVStore(self.forest.size)
                self.cells.kv[layer].restore(len(chunks), *self._traffic.take_kv(layer))
            with self.engine.layer_open(layer):
                if layer < segment[-1]:
                    kept = self._keeps_attention(layer)
                    for c in self._traffic.ahead(chunks, inputs=layer, attention=layer if kept else None):
                        hidden = self._traffic.input(layer, c, last=False)
                        attention = self._traffic.attention(layer, c, last=False) if kept else None
                        output = self.cells.run(layer, c, hidden, kept=attention)
                        self._traffic.put_input(layer + 1, c, output)
                        del hidden, attention, output
                elif self._rebuilds(layer):
                    # The last chunk's cell comes first on the way back and writes its own keys and values.
                    ahead = self._traffic.ahead(
                        chunks[:-1], depth=_REBUILT_AHEAD, then=[self._first_cell(layer)], inputs=layer
                    )
                    for c in ahead:
                        self.cells.rebuild_kv(layer, c, self._traffic.input(layer, c, last=False))
        for layer in reversed(segment):
            self._backward_layer(layer, self._after(segment, layer))

    def _rebuilds(self, layer: int) -> bool:
        """Whether keys and values of the layer must be made again before its backward."""
        return self.engine.structure.donors[layer] == layer and layer not in self.cells.kv

    # what is asked for next

    def _first_cell(self, layer: int) -> list[Place]:
        """What the first cell of a layer's backward asks for."""
        kept = layer if self._keeps_attention(layer) else None
        return self._traffic.places(len(self.chunks) - 1, inputs=layer, attention=kept, flow=layer + 1)

    def _start(self, segment: range) -> Groups:
        """What a segment's backward asks for first: two pieces of work, as the first may be short."""
        first, last = segment[0], len(self.chunks) - 1
        if len(segment) > 1:
            kept = first if self._keeps_attention(first) else None
            return [self._traffic.places(0, inputs=first, attention=kept)]
        again = range(last) if self._keep(first) != "kv" and self._rebuilds(first) else range(0)
        return [*(self._traffic.places(c, inputs=first) for c in again[:2]), self._first_cell(first)][:2]

    def _after(self, segment: range, layer: int) -> Groups:
        """What the walk will ask for first when a layer's backward is done."""
        if layer > segment[0]:
            return [self._first_cell(layer - 1)]
        below = next((other for other in self._segments if other[-1] == layer - 1), None)
        return _NO_GROUPS if below is None else self._start(below)

    def _after_head(self) -> Groups:
        return self._start(self._segments[-1]) if self._segments and self._whole == self._count else _NO_GROUPS

    def _keeps_attention(self, layer: int) -> bool:
        return self._keep(layer) == "attention" and self.engine.structure.donors[layer] is not None

    def _backward_layer(self, layer: int, then: Groups = _NO_GROUPS) -> None:
        parameters = self._layers[layer].trained
        whole = layer >= self._whole
        kept = self._keeps_attention(layer)
        halves = self.plan.halves and self.engine.structure.donors[layer] is not None
        order = range(len(self.chunks) - 1, -1, -1)
        ahead = self._traffic.ahead(
            order,
            inputs=None if whole else layer,
            attention=layer if kept else None,
            flow=layer + 1,
            then=then,
        )
        with self.engine.layer_open(layer):
            for c in ahead:
                dflow = self._traffic.flow(layer + 1, c)
                if whole:
                    grads = self.cells.gradients(self._graphs.pop((layer, c)), dflow, parameters)
                else:
                    attention = self._traffic.attention(layer, c) if kept else None
                    hidden = self._traffic.input(layer, c)
                    if halves:
                        grads = self.cells.gradients_in_halves(layer, c, hidden, attention, dflow, parameters)
                    else:
                        graph = self.cells.graph(layer, c, hidden, attention, read=False)
                        del attention, hidden
                        grads = self.cells.gradients(graph, dflow, parameters)
                        del graph
                    attention = hidden = None
                self._traffic.forget_call(layer, c)
                if grads[0] is not None:
                    self._traffic.turn(layer, c, grads[0])
                inputs = len(grads) - len(parameters)
                if self._outer:
                    self._call_gradients[layer, c] = grads[1:inputs]
                self.sums.add(parameters, grads[inputs:])
                del dflow, grads
        self.cells.kv.pop(layer, None)

    def _backward_prologue(self) -> None:
        """Gradients of trained parameters before and beside the layers, through what the prologue recorded."""
        for c in range(len(self.chunks)):
            prologue = self._traffic.prologue(c)
            outputs, doutputs = [prologue.residual], [self._traffic.flow(0, c)]
            for layer in range(self.lowest, self._count):
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

    def _told(self, phase: str, layer: int | None = None) -> None:
        if self.engine.on_phase is not None:
            self.engine.on_phase(phase, layer)

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
        # One class of layers compiles once with a graph, once without and once for each kind of call inside.
        many = torch._dynamo.config.patch(recompile_limit=64) if self.engine.compile else nullcontext()
        with self.stack.attending(self.engine.port.name), self.stack.rope.row(last), autocast, many:
            try:
                yield
            except BaseException:
                self._traffic.clear()
                raise
            finally:
                self.engine.port.cell = None
