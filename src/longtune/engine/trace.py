"""What a step of a plan takes, found by running the engine itself on tensors without memory.

A ghost is a copy of the model on the meta device. Its engine walks it as it would walk the model, and a dispatch mode
(`meter.py`) watches every operation. Nothing about a walk is written down here a second time, so a walk that changes
changes its prediction.

Tensors on the meta device stand for the device's, tensors on the CPU for themselves. What kernels take inside
themselves, and what hardware makes of the work, is in `workspace.py`, `standins.py` and `cost.py`; long rows and deep
stacks are extrapolated in `forecast.py`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from longtune.attention.merge import merge_fused
from longtune.attention.path import PathKernel
from longtune.attention.select import cuda_path_kernels
from longtune.engine.boundary import Store
from longtune.engine.engine import Engine
from longtune.engine.meter import Bytes, Meter, Slot
from longtune.engine.plan import Plan
from longtune.engine.standins import Watch, stand_in
from longtune.head.form import read_form
from longtune.head.heads import Chunked, Head, ModelHead, gpu_head, make_head
from longtune.model.packed.storage import inner_tensors, without_values
from longtune.model.stack import find_layers, unwrap
from longtune.objective.base import Outcome
from longtune.tree import Forest

_HELD_BACK = 2
"""Tensors that a copy to the host still holds (see `boundary.py`)."""


class TraceStore:
    """A boundary store that only counts.

    Args:
        meter: is told of the bytes.
        kind: device, host or disk.
        overlaps: copies run beside the computation: a tensor on its way out is still held, and one on its way
            in is there from its `fetch` on.
    """

    def __init__(self, meter: Meter, kind: str, overlaps: bool):
        self.meter, self.kind, self.overlaps = meter, kind, overlaps
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._coming: dict[Hashable, torch.Tensor] = {}
        self._leaving: list[torch.Tensor] = []
        self._count = [0]

    def _move(self, tensor: torch.Tensor, sign: int) -> None:
        self._count[0] += sign * tensor.numel() * tensor.element_size()
        self.meter.away[self.kind] = max(self.meter.away.get(self.kind, 0), self._count[0])

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        if self.kind == "device":
            self.meter.reclassify(tensor, "boundaries")
            self._kept[key] = tensor
            return
        self._move(tensor, 1)
        if self.overlaps:
            self._leaving = [*self._leaving, tensor][-_HELD_BACK:]
        # A shape and a dtype, without a storage that is counted.
        self._kept[key] = _Shape(tensor.shape, tensor.dtype)  # pyright: ignore[reportArgumentType]

    def fetch(self, key: Hashable) -> None:
        if self.kind != "device" and self.overlaps and key in self._kept and key not in self._coming:
            self._coming[key] = self._made(key)

    def _made(self, key: Hashable) -> torch.Tensor:
        tensor = torch.empty(self._kept[key].shape, dtype=self._kept[key].dtype, device="meta")
        self.meter.reclassify(tensor, "flow")
        return tensor

    def read(self, key: Hashable) -> torch.Tensor:
        if self.kind == "device":
            return self._kept[key]
        return self._coming.pop(key) if key in self._coming else self._made(key)

    def take(self, key: Hashable) -> torch.Tensor:
        tensor = self.read(key)
        self.drop(key)
        if self.kind == "device":
            self.meter.reclassify(tensor, "flow")
        return tensor

    def drop(self, key: Hashable) -> None:
        self._coming.pop(key, None)
        kept = self._kept.pop(key)
        if self.kind != "device":
            self._move(kept, -1)

    def clear(self) -> None:
        for key in list(self._kept):
            self.drop(key)

    def section(self) -> TraceStore:
        other = TraceStore(self.meter, self.kind, self.overlaps)
        other._count = self._count
        return other

    def close(self) -> None:
        self.clear()


@dataclass(frozen=True, slots=True)
class _Shape:
    shape: torch.Size
    dtype: torch.dtype

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize


class _AnyObjective:
    """Stands for an objective: what it does with log-probs takes nothing that counts."""

    uses_prompt_targets = True
    uses_reference = False

    def __init__(self, one_pass: bool):
        self.one_pass = one_pass

    def totals(self, forest: Forest) -> dict[str, float]:
        return {}

    def known_cotangent(self, forest: Forest, totals: Any) -> torch.Tensor | None:
        return torch.ones(len(forest.targets)) if self.one_pass else None

    def __call__(self, forest: Forest, log_probs: torch.Tensor, totals: Any) -> Outcome:
        return Outcome({"loss": 0.0}, torch.ones(len(forest.targets)))


@dataclass(frozen=True, slots=True)
class Traced:
    """One walk, watched.

    Attributes:
        slots: its stretches, in order.
        away: most bytes at once off the device, by where.
    """

    slots: tuple[Slot, ...]
    away: Bytes

    @property
    def peak(self) -> int:
        """Most device bytes at once."""
        return max(slot.peak for slot in self.slots)


class Ghost:
    """A model without memory, and an engine that walks it.

    Args:
        model: as for `Engine`; if it isn't on the meta device, a copy is made there. It is not changed.
        attention: name of the attention kernel of the device that is stood for.
        device: its type; "cpu" and "cuda" differ in what kernels take and in how copies overlap.
        like: an engine of the real model; what it found out by trial is taken over.
        depth: leave only so many of the first layers.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: str,
        device: str,
        like: Engine | None = None,
        depth: int | None = None,
    ):
        self.device = device
        self.grain = 512 if device == "cuda" else 64
        self._source, self._attention, self._like, self._depth = model, attention, like, depth
        self._shapes: dict[Any, Any] = {}
        self._watch = Watch()

    @functools.cached_property
    def engine(self) -> Engine:
        """Made when it is first needed: often shorter ghosts are enough."""
        there = next(self._source.parameters()).is_meta and self._depth is None
        model = self._source if there else ghost_of(self._source, self._depth)
        with Meter(self.grain, self.device, self._shapes):
            engine = Engine(model, Plan(), attention=self._attention)
            stand_in(engine.port.attention, self._path_kernels(), self._merges(), self._watch)
        if self._like is not None:
            engine.unchunkable = self._like.unchunkable
        return engine

    def _learn_unread(self) -> None:
        """What recomputed cells leave out; not on a walk that is watched."""
        teacher = self.engine if self._like is None else self._like
        shapes_only = teacher.stack.device.type == "meta"
        with Meter(self.grain, self.device, self._shapes) if shapes_only else nullcontext():
            known = teacher.unread
        self.engine.unread = known[: self.layers]

    def _path_kernels(self) -> Sequence[PathKernel]:
        """The kernels of the device that is stood for; with triton, where it isn't known that it is missing."""
        if self.device != "cuda":
            return ()
        if self._like is not None and self._like.stack.device.type == "cuda":
            return self._like.port.attention.paths
        return [kernel for kernel, _ in cuda_path_kernels(self._attention, triton=True)]

    def _merges(self) -> bool:
        """Whether the device that is stood for merges blocks by a kernel; as above."""
        if self.device == "cuda" and self._like is not None and self._like.stack.device.type == "cuda":
            return self._like.port.attention.merge is merge_fused
        return self.device == "cuda"

    @property
    def known(self) -> Engine:
        """An engine to ask about the model: that of the real one, where there is one."""
        return self.engine if self._like is None else self._like

    def close(self) -> None:
        if "engine" in self.__dict__:
            self.engine.close()

    def short(self, depth: int) -> Ghost:
        """A ghost of the model's first `depth` layers."""
        other = Ghost(self._source, self._attention, self.device, self.known, depth)
        other._shapes, other._watch = self._shapes, self._watch
        if "engine" in self.__dict__:
            other.engine.port.attention = self.engine.port.attention
        return other

    @property
    def layers(self) -> int:
        return self._depth or len(self.known.stack.layers)

    @property
    def _head_kind(self) -> str:
        if self._like is None or self._like.stack.device.type == "meta":
            return "gpu" if self.device == "cuda" else "chunked"
        kinds = {ModelHead: "model", Chunked: "chunked"}
        return kinds.get(type(self._like.head), "gpu")  # pyright: ignore[reportArgumentType]

    def _head(self, chunk: int | None) -> Head:
        stack = self.engine.stack
        if self._head_kind == "model":
            return ModelHead(stack, chunk)
        if self._head_kind == "gpu":
            form = read_form(stack, trained=True, packed=True)
            return ModelHead(stack, chunk) if form is None else gpu_head(form, chunk)
        return make_head(stack, chunk)

    def trace(self, plan: Plan, forest: Forest, one_pass: bool = True) -> Traced:
        """Walk a row by a plan.

        Args:
            one_pass: the objective's cotangents are known before its log-probs.
        """
        engine, stack = self.engine, self.engine.stack
        whole = self.layers - (plan.keep_layers or self.layers) if plan.keep == "everything" else self.layers
        if whole:
            self._learn_unread()
        meter = Meter(self.grain, self.device, self._shapes, whole, self._watch)
        engine.plan = plan
        engine.head = self._head(plan.head_chunk)
        overlaps = self.device == "cuda"
        engine.boundaries = cast(Store, TraceStore(meter, plan.boundary_store, overlaps))
        moves = plan.boundary_store == "disk"
        engine.moving = cast(Store, TraceStore(meter, "host", overlaps)) if moves else engine.boundaries
        engine.on_phase = meter.end_phase
        originals = stack.layer, stack.prologue, stack.epilogue
        attention = engine.port.attention
        through = attention.backward

        def layer(index: int, *args: Any) -> Any:
            cell = engine.port.cell
            assert cell is not None
            meter.begin("stop" if cell.stop else "layer", index, cell.chunk.index)
            return originals[0](index, *args)

        def prologue(*args: Any) -> Any:
            meter.begin("prologue")
            return originals[1](*args)

        def epilogue(*args: Any) -> Any:
            meter.begin("epilogue")
            return originals[2](*args)

        def backward(*args: Any) -> Any:
            meter.attends_back(args[5].index)
            return through(*args)

        self._watch.count = meter.count
        attention.backward = backward
        cast(Any, stack).layer, cast(Any, stack).prologue, cast(Any, stack).epilogue = layer, prologue, epilogue
        try:
            with meter:
                engine.accumulate(forest, cast(Any, _AnyObjective(one_pass)), {})
                meter.end_phase("deliver", None)
        finally:
            for name in ("layer", "prologue", "epilogue"):
                delattr(stack, name)
            del attention.backward
            self._watch.count = None
            engine.on_phase = None
            for parameter in engine.model.parameters():
                parameter.grad = None
        return Traced(tuple(meter.slots), dict(meter.away))


def ghost_of(model: nn.Module, depth: int | None = None) -> nn.Module:
    """A copy of a model on the meta device: the same modules, no values.

    Args:
        depth: copy only so many of the first layers.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for tensor in holder.values():
                if tensor is None or id(tensor) in memo:
                    continue
                empty = without_values(tensor.data)
                if isinstance(tensor, nn.Parameter):
                    memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                else:
                    memo[id(tensor)] = empty
    if depth is None:
        return copy.deepcopy(model, memo)
    layers = find_layers(unwrap(model))[1]
    memo[id(layers)] = nn.ModuleList(copy.deepcopy(layer, memo) for layer in list(layers)[:depth])
    found = copy.deepcopy(model, memo)
    unwrap(found).config.get_text_config().num_hidden_layers = depth
    return found


def stored_bytes(tensors: Iterable[torch.Tensor], grain: int = 512) -> int:
    """Bytes of the storages of some tensors, each rounded up to `grain`."""
    storages = {}
    for inner in (inner for tensor in tensors for inner in inner_tensors(tensor)):
        storage = inner.untyped_storage()
        storages[storage._cdata] = -(-storage.nbytes() // grain) * grain
    return sum(storages.values())
