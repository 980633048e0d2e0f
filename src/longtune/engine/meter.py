"""A dispatch mode that counts what lives and what is computed on the meta device while it is active.

Storages that are born and die give bytes, sorted by the room of the code that asked for them; shapes of operations give
work. Values that code asks for, which aren't there, get something in their place. `trace.py` has walks run under it.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import longtune
from longtune.engine.standins import Watch
from longtune.engine.workspace import Work, temporaries, work_of

CLASSES = ("kv", "boundaries", "flow", "kept", "prologue", "cell", "head", "gradients")
"""What the device bytes of a walk are for. `flow` is the residual stream or its gradient, `kept` are activations."""

Bytes = dict[str, int]

_ROOT = str(Path(longtune.__file__).parent)
_OWN = {__file__, str(Path(__file__).with_name("trace.py"))}
_ROOMS = {
    "attention/store.py": "kv",
    "engine/gradients.py": "gradients",
    "engine/boundary.py": "boundaries",
    "head/": "head",
}


@dataclass(slots=True)
class Slot:
    """A stretch of a walk from one call of the stack to the next.

    Attributes:
        what: prologue, layer, stop (a layer left at its attention call), epilogue, back (from the backward of a kept
            cell's attention to that of the next) or rest.
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
        watch: tells when attention counts its work itself.

    Attributes:
        slots: the walk's stretches so far.
        away: most bytes off the device so far, by where ("host", "disk").
    """

    def __init__(
        self,
        grain: int,
        kernels: str,
        shapes: dict[Any, Any],
        whole: int = sys.maxsize,
        watch: Watch | None = None,
    ):
        super().__init__()
        self._shapes = shapes
        self._whole = whole
        self._watch = watch or Watch()
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

    def attends_back(self, chunk: int) -> None:
        """The backward of a chunk's attention begins: where nothing is recomputed, that alone tells chunks apart."""
        if self._phase == "backward" and self.slots[-1].what in ("rest", "back"):
            self.begin("back", chunk=chunk)

    def count(self, work: Work) -> None:
        self.slots[-1].work.add(work)

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
        if not (self._watch.silent and "attention" in name):
            self.count(work)
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
            out = _grouped_product(*args, **kwargs) if name == "_grouped_mm" else func(*args, **kwargs)
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


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """A grouped product without values in any dtype: torch's own knows bfloat16 alone on the meta device."""
    if a.ndim == 3 and b.ndim == 3:
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    if a.ndim == 2 and b.ndim == 2:  # Split along what is summed over: a product for each group.
        assert offs is not None
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[-2], b.shape[-1])


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
    if not file.startswith(_ROOT) or file in _OWN:
        return None
    path = file[len(_ROOT) + 1 :].replace("\\", "/")
    return next((name for prefix, name in _ROOMS.items() if path.startswith(prefix)), "cell")
