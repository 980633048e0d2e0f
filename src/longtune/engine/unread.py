"""Which linears of a layer need not be computed when a cell is run for its gradients alone.

The last linear of a layer ends in the residual stream: its values are added, nothing of the backward depends on them,
and the cell's output is known already. The same holds for the projections of keys and values that are in the KV store.
That is more than a quarter of a recomputed layer's products. Which linears these are is read off the layer itself,
not off its class: `find_unread` follows the values of each linear through one small cell with a graph and sees whether
autograd saves anything made of them. Then the gradients with and without are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtune.attention.store import KVStore
from longtune.model.lora import LeanLinear

if TYPE_CHECKING:
    from longtune.engine.cells import Cells


@dataclass(frozen=True, slots=True)
class Unread:
    """Names, inside a layer, of the linears whose values nobody reads in a cell with a graph.

    Attributes:
        fresh: where the cell writes its own keys and values.
        stored: where they are in the store already.
    """

    fresh: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()


NOTHING = Unread()


@contextmanager
def left_out(layer: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Around a run of a layer: these linears give placeholders."""
    modules: list[Any] = [layer.get_submodule(name) for name in names]
    for module in modules:
        module.unread = True
    try:
        yield
    finally:
        for module in modules:
            module.unread = False


class _Follower(TorchDispatchMode):
    """Follows values through operations, a bit for each source; a storage carries the bits of all that went into it.

    Attributes:
        needed: bits whose values are saved for a backward, or decided something in Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = 0
        self._bits: dict[int, int] = {}
        self._held: list[Any] = []
        """Keeps the storages alive: a new one must not get an old one's address."""

    def of(self, *values: Any) -> int:
        found = 0
        for x in tree_leaves(values):
            if isinstance(x, torch.Tensor):
                found |= self._bits.get(x.untyped_storage()._cdata, 0)
        return found

    def mark(self, tensor: torch.Tensor, bits: int) -> None:
        storage = tensor.untyped_storage()
        self._bits[storage._cdata] = self._bits.get(storage._cdata, 0) | bits
        self._held.append(storage)

    def save(self, tensor: torch.Tensor) -> None:
        """Called with what autograd saves. Nothing is kept of it, as nobody goes back: a node that held its own output
        would never be freed, nor would the model's weights."""
        self.needed |= self.of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        bits = self.of(args, kwargs)
        if not bits:
            return out
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        named = zip(func._schema.arguments, args, strict=False)
        written = [x for a, x in named if a.alias_info is not None and a.alias_info.is_write]
        for tensor in (*made, *(x for x in tree_leaves(written) if isinstance(x, torch.Tensor))):
            self.mark(tensor, bits)
        if not made and not written:
            self.needed |= bits  # A number for Python.
        return out


def _nothing_saved(_: None) -> torch.Tensor:
    raise RuntimeError("a graph that is only looked at has no backward")


def find_unread(cells: Cells, layer: int, hidden: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Unread:
    """Look at one cell of a layer (chunk 0; dropout must be off).

    Args:
        hidden: its input.
        parameters: the layer's trained ones.
    """
    module = cells.stack.layers[layer]
    candidates = {name: m for name, m in module.named_modules() if isinstance(m, LeanLinear)}
    home = cells.engine.structure.donors[layer]
    if not candidates or home is None:
        return NOTHING
    if home == layer:
        cells.kv.pop(layer, None)
    names: list[tuple[str, ...]] = []
    for _ in range(2):
        # The first cell writes keys and values; the second one finds them.
        found = _followed(cells, layer, hidden, candidates)
        if found and cells.stack.device.type != "meta":
            found = found if _harmless(cells, layer, hidden, parameters, found) else ()
        names.append(found)
    return Unread(*names)


def _followed(cells: Cells, layer: int, hidden: torch.Tensor, candidates: dict[str, LeanLinear]) -> tuple[str, ...]:
    follower = _Follower()
    calls = dict.fromkeys(candidates, 0)
    handles = []
    for number, (name, module) in enumerate(candidates.items()):

        def called(_: Any, args: Any, output: torch.Tensor, name: str = name, bit: int = 1 << number) -> None:
            calls[name] += 1
            follower.mark(output, bit)

        handles.append(module.register_forward_hook(called))
    try:
        with follower, torch.autograd.graph.saved_tensors_hooks(follower.save, _nothing_saved):
            cells.graph(layer, 0, hidden)
        home = cells.engine.structure.donors[layer]
        if home == layer:
            follower.needed |= follower.of(*cells.kv[layer].keys_and_values)
    finally:
        for handle in handles:
            handle.remove()
    # What wasn't reached says nothing of itself (an expert without tokens, say).
    return tuple(
        name for number, name in enumerate(candidates) if calls[name] == 1 and not follower.needed >> number & 1
    )


def _harmless(
    cells: Cells, layer: int, hidden: torch.Tensor, parameters: Sequence[nn.Parameter], names: tuple[str, ...]
) -> bool:
    """Whether the gradients stay the same: kernels that are no operations of torch can't be followed."""
    output = None
    gradients = []
    for left in ((), names):
        if cells.engine.structure.donors[layer] == layer:
            # Gradients of keys and values add up in a store.
            store = KVStore(cells.forest.size)
            store.restore(1, *cells.kv[layer].keys_and_values)
            cells.kv[layer] = store
        with left_out(cells.stack.layers[layer], left):
            graph = cells.graph(layer, 0, hidden)
        if output is None:
            generator = torch.Generator().manual_seed(layer)
            output = torch.randn(graph.output.shape, generator=generator).to(graph.output)
        gradients.append(cells.gradients(graph, output, parameters))
    tolerance = 1e-4 if output is not None and output.dtype in (torch.float32, torch.float64) else 3e-2
    for ours, theirs in zip(*gradients, strict=True):
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and theirs is not None:
            error = torch.linalg.norm((ours - theirs).double())
            if not error <= tolerance * torch.linalg.norm(theirs.double()):
                return False
    return True
