"""What moves through a walk, and where it lives: the residual stream and its gradient (the flow), the boundaries, what
cells keep, and the arguments that the prologue recorded.

The walk asks by layer and chunk; which store answers, and what is on its way while another chunk is in work, is decided
here. Nothing here computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from longtune.engine.boundary import DeviceStore, Store
from longtune.engine.plan import STREAM_CHUNKS, Plan
from longtune.model.stack import LayerCall, Prologue

Place = tuple[Store, Hashable]


class _Moved:
    """Stands in a layer's arguments for a tensor that lives in a store."""

    def __init__(self, key: Hashable):
        self.key = key


class Traffic:
    """The tensors of one walk outside its cells and KV stores.

    A level is the place before a layer; level n, of n layers, is the place behind the last one.

    Args:
        plan: the walk's plan.
        boundaries: the store that the plan names; a section of it is used.
        moving: the store for the flow where it leaves the device.
        chunks: number of chunks.
        firsts: the first layer of each segment; their inputs are the boundaries.
        whole: the first layer of which everything is kept; the flow stays on the device from there on. Above the
            last level, if there is no such layer: the flow behind the last layer moves too.
    """

    def __init__(
        self, plan: Plan, boundaries: Store, moving: Store, chunks: int, firsts: Sequence[int], whole: int
    ) -> None:
        self._firsts = frozenset(firsts)
        self._whole = whole
        self._store = boundaries.section()
        self._near: Store = DeviceStore()
        # With few chunks a chunk would wait for its own copy, and the flow is small beside a cell.
        self._streams = plan.boundary_store != "device" and chunks >= STREAM_CHUNKS
        apart = moving is not boundaries
        self._far: Store = self._near if not self._streams else moving.section() if apart else self._store
        self._prologues: dict[int, Prologue] = {}
        self._calls: dict[int, list[LayerCall]] = {}
        self._own: dict[tuple[int, int], list[Hashable]] = {}
        """By cell, keys of its arguments that moved."""

    def clear(self) -> None:
        """Forget everything."""
        for store in (self._store, self._far, self._near):
            store.clear()
        self._prologues.clear()
        self._calls.clear()
        self._own.clear()

    # where things are

    def _flow(self, level: int, c: int) -> Place:
        return (self._near if level >= self._whole else self._far), ("flow", level, c)

    def _input(self, layer: int, c: int) -> Place:
        return (self._store if layer in self._firsts else self._far), ("input", layer, c)

    def _entering(self, layer: int, c: int) -> Place:
        """Where a cell finds its input on the way forward: a boundary in the flow's own store is not kept twice."""
        boundary = layer in self._firsts and self._far is self._store
        return self._input(layer, c) if boundary else self._flow(layer, c)

    def _attention(self, layer: int, c: int) -> list[Place]:
        return [(self._store, (name, layer, c)) for name in ("out", "lse")]

    def _moved(self, layer: int, c: int) -> list[Place]:
        return [(self._far, key) for key in self._own.get((layer, c), ())]

    def places(
        self,
        c: int,
        *,
        entering: int | None = None,
        inputs: int | None = None,
        attention: int | None = None,
        flow: int | None = None,
    ) -> list[Place]:
        """Where the work on a chunk finds what it asks for.

        Args:
            entering, inputs, attention: layers whose cells' forward inputs, kept inputs, kept attention are asked for.
            flow: the level at which the flow is asked for.
        """
        found = []
        if entering is not None:
            found += [self._entering(entering, c), *self._moved(entering, c)]
        if inputs is not None:
            found += [self._input(inputs, c), *self._moved(inputs, c)]
        if attention is not None:
            found += self._attention(attention, c)
        if flow is not None:
            found.append(self._flow(flow, c))
        return found

    def ahead(
        self, order: Iterable[int], *, depth: int = 1, then: Sequence[list[Place]] = (), **asked: int | None
    ) -> Iterator[int]:
        """The chunks of `order`; what the next ones will ask for is on its way while one is in work.

        Args:
            depth: how many chunks ahead.
            then: what is asked for after the last chunk, group by group; all of it is on its way during that chunk.
            asked: see `places`.
        """
        chunks = list(order)
        groups = [*(self.places(c, **asked) for c in chunks), *then]
        fetched = 0
        for number, c in enumerate(chunks):
            reach = len(groups) if number + 1 == len(chunks) else number + 1 + depth
            for store, key in (place for group in groups[fetched:reach] for place in group):
                store.fetch(key)
            fetched = max(fetched, reach)
            yield c

    # forward

    def begin(self, c: int, prologue: Prologue, trained: bool) -> None:
        """What the prologue gave for a chunk; kept with its graph where something in it is trained."""
        calls = prologue.calls
        if trained:
            self._prologues[c] = prologue
        elif self._streams and len(calls) > 1:
            calls = self._move_own(c, calls)
        self._calls[c] = calls
        self._enter_level(0, c, prologue.residual.detach())

    def _move_own(self, c: int, calls: list[LayerCall]) -> list[LayerCall]:
        """Tensors that only one layer gets (per-layer inputs) leave the device; what all layers share stays."""

        def same(x: torch.Tensor) -> Hashable:
            return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()

        flat = [tree_flatten((call.args, call.kwargs)) for call in calls]
        uses = Counter(same(x) for leaves, _ in flat for x in leaves if isinstance(x, torch.Tensor))
        moved = []
        for layer, (call, (leaves, spec)) in enumerate(zip(calls, flat, strict=True)):
            replaced: list[Any] = []
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and uses[same(leaf)] == 1:
                    key = ("call", layer, c, i)
                    self._far.put(key, leaf)
                    self._own.setdefault((layer, c), []).append(key)
                    leaf = _Moved(key)
                replaced.append(leaf)
            args, kwargs = tree_unflatten(replaced, spec)
            moved.append(LayerCall(args, kwargs, call.hidden_keyword))
        return moved

    def _enter_level(self, level: int, c: int, hidden: torch.Tensor) -> None:
        entering = self._entering(level, c)
        places = [entering] if level not in self._firsts else dict.fromkeys([self._input(level, c), entering])
        for store, key in places:
            store.put(key, hidden)

    def enter(self, layer: int, c: int) -> torch.Tensor:
        """The input of a cell on the way forward."""
        store, key = self._entering(layer, c)
        return store.read(key) if key[0] == "input" else store.take(key)  # pyright: ignore[reportIndexIssue]

    def leave(self, layer: int, c: int, output: torch.Tensor) -> None:
        """The output of a cell on the way forward."""
        self._enter_level(layer + 1, c, output)

    def call(self, layer: int, c: int) -> LayerCall:
        """A layer's arguments for a chunk."""
        call = self._calls[c][layer]
        if (layer, c) not in self._own:
            return call
        leaves, spec = tree_flatten((call.args, call.kwargs))
        args, kwargs = tree_unflatten([self._far.read(x.key) if isinstance(x, _Moved) else x for x in leaves], spec)
        return LayerCall(args, kwargs, call.hidden_keyword)

    def put_attention(self, layer: int, c: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        for (store, key), tensor in zip(self._attention(layer, c), (out, lse), strict=True):
            store.put(key, tensor)

    def put_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._store.put(("k", layer), k)
        self._store.put(("v", layer), v)

    # backward

    def flow(self, level: int, c: int, last: bool = True) -> torch.Tensor:
        """The residual behind the last layer or, after `turn`, the gradient at a level.

        Args:
            last: whether nobody will ask for it again.
        """
        store, key = self._flow(level, c)
        return store.take(key) if last else store.read(key)

    def turn(self, level: int, c: int, gradient: torch.Tensor) -> None:
        """The gradient of the residual at a level."""
        store, key = self._flow(level, c)
        store.put(key, gradient)

    def put_input(self, layer: int, c: int, hidden: torch.Tensor) -> None:
        """The input of an inner layer of the segment in work."""
        store, key = self._input(layer, c)
        store.put(key, hidden)

    def input(self, layer: int, c: int, last: bool = True) -> torch.Tensor:
        """The input of a cell on the way back."""
        store, key = self._input(layer, c)
        return store.take(key) if last else store.read(key)

    def attention(self, layer: int, c: int, last: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept attention output and log-sum-exp."""
        out, lse = (store.take(key) if last else store.read(key) for store, key in self._attention(layer, c))
        return out, lse

    def take_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._store.take(("k", layer)), self._store.take(("v", layer))

    def forget_call(self, layer: int, c: int) -> None:
        """A cell is done: its arguments are not needed again."""
        for store, key in self._moved(layer, c):
            store.drop(key)

    def prologue(self, c: int) -> Prologue:
        """What the prologue gave, with its graph (only where something in it is trained)."""
        return self._prologues[c]
