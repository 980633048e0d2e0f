"""What a step of a plan takes, found by running the engine itself on tensors without memory.

A ghost is a copy of the model on the meta device. Its engine walks it as it would walk the model, and a dispatch mode
watches every operation: storages that are born and die give bytes, the shapes of operations give work. Nothing about a
walk is written down here a second time, so a walk that changes changes its prediction.

Tensors on the meta device stand for the device's, tensors on the CPU for themselves. What kernels take inside
themselves, and what hardware makes of the work, is in `workspace.py` and `cost.py`; long rows and deep stacks are
extrapolated in `forecast.py`.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import longtune
from longtune.engine.boundary import Store
from longtune.engine.engine import Engine
from longtune.engine.plan import Plan
from longtune.engine.workspace import Work, temporaries, work_of
from longtune.head.form import read_form
from longtune.head.heads import Chunked, Head, ModelHead, gpu_head, make_head
from longtune.model.packed.storage import inner_tensors, without_values
from longtune.model.stack import find_layers, unwrap
from longtune.objective.base import Outcome
from longtune.tree import Forest

CLASSES = ("kv", "boundaries", "flow", "kept", "prologue", "cell", "head", "gradients")
"""What the device bytes of a walk are for. `flow` is the residual stream or its gradient, `kept` are activations."""

Bytes = dict[str, int]

_ROOT = str(Path(longtune.__file__).parent)
_ROOMS = {
    "attention/store.py": "kv",
    "engine/gradients.py": "gradients",
    "engine/boundary.py": "boundaries",
    "head/": "head",
}
_HELD_BACK = 2
"""Tensors that a copy to the host still holds (see `boundary.py`)."""


@dataclass(slots=True)
class Slot:
    """A stretch of a walk from one call of the stack to the next.

    Attributes:
        what: prologue, layer, stop (a layer left at its attention call), epilogue or rest.
        layer, chunk: the cell, -1 where there is none.
        phase: the phase of the walk, and the first layer of a segment's backward (else -1).
        bytes: device bytes by class at the slot's peak.
        work: what was computed.
    """

    what: str
    layer: int = -1
    chunk: int = -1
    phase: tuple[str, int] = ("", -1)
    bytes: Bytes = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    peak: int = -1


class Meter(TorchDispatchMode):
    """Counts what lives on the meta device while it is active.

    Args:
        grain: sizes are rounded up to this (512 is that of CUDA's allocator).
        kernels: the device type that is stood for; decides what kernels take inside.
        shapes: results known from earlier meters of the same model.
        whole: the first layer whose cells keep all their activations.

    Attributes:
        slots: the walk's stretches so far.
        away: most bytes off the device so far, by where ("host", "disk").
    """

    def __init__(self, grain: int, kernels: str, shapes: dict[Any, Any], whole: int = sys.maxsize):
        super().__init__()
        self._shapes = shapes
        self._whole = whole
        self.grain, self.kernels = grain, kernels
        self.slots: list[Slot] = [Slot("rest")]
        self.away: Bytes = {}
        self.live = 0
        self.by_class: Bytes = dict.fromkeys(CLASSES, 0)
        self._storages: dict[int, list[Any]] = {}
        self._young: list[int] = []
        self._begun = 0
        self._phase = "prologue"
        self._true: weakref.WeakSet[Any] = weakref.WeakSet()
        self._experts = 1
        self._classes: dict[Any, str | None] = {}

    # bytes

    def _class(self) -> str:
        """By the room whose code asked for the memory."""
        frame = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code not in self._classes:
                self._classes[code] = _room(code.co_filename)
            if (found := self._classes[code]) is not None:
                break
            frame = frame.f_back
        else:
            found = "cell"
        return self._phase if found == "cell" and self._phase in ("prologue", "head") else found

    def _born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None and known[0]() is not None:
            return
        size = -(-storage.nbytes() // self.grain) * self.grain
        if not size:
            return
        name = self._class()
        entry: list[Any] = [None, size, name]

        def died(_: Any) -> None:
            self._note()
            self.live -= entry[1]
            self.by_class[entry[2]] -= entry[1]
            if self._storages.get(key) is entry:
                del self._storages[key]

        entry[0] = weakref.ref(storage, died)
        self._storages[key] = entry
        self.live += size
        self.by_class[name] += size
        if name == "cell":
            self._young.append(key)

    def reclassify(self, tensor: torch.Tensor, name: str) -> None:
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry[2] != name:
            self._note()
            self.by_class[entry[2]] -= entry[1]
            self.by_class[name] += entry[1]
            entry[2] = name

    def _note(self, extra: int = 0) -> None:
        """Remember the present as the slot's peak if it is."""
        slot = self.slots[-1]
        if self.live + extra > slot.peak:
            slot.peak = self.live + extra
            slot.bytes = dict(self.by_class)
            if extra:
                slot.bytes["head" if self._phase == "head" else "cell"] += extra

    def begin(self, what: str, layer: int = -1, chunk: int = -1) -> None:
        """Open the next slot; what the last cell leaves behind is kept, or the flow."""
        self._note()
        survivors = "kept" if self.slots[-1].layer >= self._whole else "flow"
        for key in self._young:
            entry = self._storages.get(key)
            if entry is not None and entry[2] == "cell":
                self.by_class["cell"] -= entry[1]
                self.by_class[survivors] += entry[1]
                entry[2] = survivors
        self._young.clear()
        self.slots.append(Slot(what, layer, chunk))

    def end_phase(self, phase: str, layer: int | None) -> None:
        """Name the slots since the last phase ended."""
        self._note()
        for slot in self.slots[self._begun :]:
            slot.phase = (phase, -1 if layer is None else layer)
        self._begun = len(self.slots)
        self._phase = {"prologue": "forward", "forward": "head"}.get(phase, "backward")
        self.begin("rest")

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        if name in _VALUES:
            found = self._value(name, args, kwargs)
            if found is not None:
                return found
        if func.is_view:
            return func(*args, **kwargs)
        out, cost = self._made(func, name, args, kwargs)
        if isinstance(out, torch.Tensor):
            if not out.is_meta:
                return out
            self._born(out)
            if name == "all":
                self._true.add(out.untyped_storage())
        elif isinstance(out, (tuple, list)):
            for x in out:
                if isinstance(x, torch.Tensor) and x.is_meta:
                    self._born(x)
        extra, work = cost
        if extra:
            self._note(extra)
        self.slots[-1].work.add(work)
        return out

    def _made(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, tuple[int, Work]]:
        """What an operation returns, and what it takes; remembered, as cells repeat and torch is slow with shapes."""
        key = (func, _spec(args), _spec(tuple(kwargs.items())))
        try:
            known = self._shapes.get(key)
        except TypeError:  # An argument that can't be hashed.
            key = known = None
        if isinstance(given := kwargs.get("out"), torch.Tensor):
            # It is there already: nothing is made.
            cost = known[1] if known is not None else self._cost(name, args, kwargs, given)
            if key is not None:
                self._shapes[key] = ("out", cost)
            return given, cost
        if known is None:
            out = func(*args, **kwargs)
            cost = self._cost(name, args, kwargs, out)
            if key is not None:
                recipe = "same" if name.endswith("_") and out is args[0] else _recipe(out, args)
                self._shapes[key] = (recipe, cost)
            return out, cost
        recipe, cost = known
        if recipe == "same":
            return args[0], cost
        return (func(*args, **kwargs) if recipe is None else _cooked(recipe)), cost

    def _cost(self, name: str, args: Any, kwargs: Any, out: Any) -> tuple[int, Work]:
        outs = (out,) if isinstance(out, torch.Tensor) else out if isinstance(out, (tuple, list)) else ()
        meta = [x for x in outs if isinstance(x, torch.Tensor) and x.is_meta]
        if not meta:
            return 0, Work()
        return temporaries(self.kernels, name, args, kwargs, meta), work_of(name, args, kwargs, meta)

    def _value(self, name: str, args: Any, kwargs: Any) -> Any:
        """Something in place of values that are not there."""
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if name == "copy_" and source.is_meta and not args[0].is_meta:
                return args[0]
            if name == "_to_copy" and source.is_meta and (kwargs.get("device") or source.device).type == "cpu":
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return None
        tensor = args[0]
        if not tensor.is_meta:
            return None
        if name == "_local_scalar_dense":
            if tensor.dtype == torch.bool:
                return tensor.untyped_storage() in self._true
            return 1.0 if tensor.is_floating_point() else 1
        # A router's choice: every expert is hit, and all get the same share.
        if tensor.ndim == 1:
            self._experts = max(1, tensor.shape[0] - 1)
            count = tensor.shape[0]
        else:
            count = -(-tensor.numel() // self._experts)
        index = torch.empty(count, tensor.ndim, dtype=torch.int64, device="meta")
        self._born(index)
        return index


def _spec(x: Any) -> Any:
    """What of an argument decides the shape of a result."""
    if isinstance(x, torch.Tensor):
        return (x.device.type, x.dtype, x.shape, x.stride()) if x.is_meta or x.ndim == 0 else [x]
    if isinstance(x, (list, tuple)):
        return tuple(_spec(y) for y in x)
    return (type(x), x)


def _recipe(out: Any, args: Any) -> Any:
    """How to make a result again; None if it must be asked for each time (it isn't new, or isn't on the device)."""
    if isinstance(out, torch.Tensor):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        if not out.is_meta or out.untyped_storage()._cdata in inputs or out.storage_offset():
            return None
        return (out.shape, out.stride(), out.dtype)
    if isinstance(out, (list, tuple)):
        made = [_recipe(x, args) if isinstance(x, torch.Tensor) else ("constant", x) for x in out]
        return None if None in made else [type(out), *made]
    return None


def _cooked(recipe: Any) -> Any:
    if isinstance(recipe, list):
        return recipe[0](x[1] if x[0] == "constant" else _cooked(x) for x in recipe[1:])
    shape, stride, dtype = recipe
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


_VALUES = {"_to_copy", "copy_", "_local_scalar_dense", "nonzero"}


def _room(file: str) -> str | None:
    if not file.startswith(_ROOT) or file == __file__:
        return None
    path = file[len(_ROOT) + 1 :].replace("\\", "/")
    return next((name for prefix, name in _ROOMS.items() if path.startswith(prefix)), "cell")


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

    @functools.cached_property
    def engine(self) -> Engine:
        """Made when it is first needed: often shorter ghosts are enough."""
        there = next(self._source.parameters()).is_meta and self._depth is None
        model = self._source if there else ghost_of(self._source, self._depth)
        with Meter(self.grain, self.device, self._shapes):
            engine = Engine(model, Plan(), attention=self._attention)
        if self._like is not None:
            engine.unchunkable = self._like.unchunkable
        return engine

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
        other._shapes = self._shapes
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
        meter = Meter(self.grain, self.device, self._shapes, whole)
        engine.plan = plan
        engine.head = self._head(plan.head_chunk)
        overlaps = self.device == "cuda"
        engine.boundaries = cast(Store, TraceStore(meter, plan.boundary_store, overlaps))
        moves = plan.boundary_store == "disk"
        engine.moving = cast(Store, TraceStore(meter, "host", overlaps)) if moves else engine.boundaries
        engine.on_phase = meter.end_phase
        originals = stack.layer, stack.prologue, stack.epilogue

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

        cast(Any, stack).layer, cast(Any, stack).prologue, cast(Any, stack).epilogue = layer, prologue, epilogue
        try:
            with meter:
                engine.accumulate(forest, cast(Any, _AnyObjective(one_pass)), {})
                meter.end_phase("deliver", None)
        finally:
            for name in ("layer", "prologue", "epilogue"):
                delattr(stack, name)
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
