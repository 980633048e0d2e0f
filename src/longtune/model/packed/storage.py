"""How any module's weight is stored: its width, its bytes, and its numbers. One protocol for every kind of base.

Covers packed modules of this package, bitsandbytes, torchao and compressed-tensors weights that can be asked, GGUF
weights whose width was remembered when they were loaded, and plain modules. A module of a kind that is not known counts
as what its tensors are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

_REMEMBERED = "stored_bits"


@runtime_checkable
class Packed(Protocol):
    """A frozen weight that is kept packed."""

    stored_bits: float

    def dequantise(self, dtype: torch.dtype | None = None, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        """The numbers [out, in] (or the given rows of them) in a dtype; a new tensor each time."""
        ...


def bits_of(module: nn.Module) -> float:
    """Bits in which each number of a module's weight is stored, scales not counted.

    A weight that was quantised in its file and dequantised on loading (GGUF) has the width of the file. A plain weight
    has that of its dtype.

    Raises:
        ValueError: the module has no weight.
    """
    remembered = getattr(module, _REMEMBERED, None)
    if remembered is not None:
        return float(remembered)
    weight = weight_of(module)
    kind = type(weight).__name__
    if kind == "Params4bit":
        return 4.0
    if kind == "Int8Params" and getattr(module, "state", None) is not None:
        return 8.0
    scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)
    if scheme is not None:  # compressed-tensors
        return float(scheme.num_bits)
    if (asked := _subclass_bits(weight)) is not None:
        return asked
    if isinstance(getattr(module, "bits", None), int) and not weight.is_floating_point():  # GPTQ, AWQ
        return float(cast(Any, module).bits)
    return 8.0 * weight.element_size()


def is_quantised(module: nn.Module) -> bool:
    """Whether a module's weight is stored as something else than plain 16, 32 or 64-bit floats."""
    if getattr(module, _REMEMBERED, None) is not None:
        return bits_of(module) < 16
    weight = weight_of(module)
    return bits_of(module) != 8.0 * weight.element_size() or not weight.is_floating_point() or weight.element_size() < 2


def remember_bits(module: nn.Module, bits: float) -> None:
    """Note the width that a module's weight had in its file."""
    setattr(module, _REMEMBERED, float(bits))


def packed_bytes(module: nn.Module) -> int:
    """Bytes that a module's own tensors take (scales, biases and quantisation constants included); children count too.

    A tensor that several modules share is counted once.
    """
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    for child in module.modules():
        state = getattr(getattr(child, "weight", None), "quant_state", None)
        if state is not None:  # bitsandbytes keeps its constants beside the parameter.
            tensors += _state_tensors(state)
        held = getattr(getattr(child, "weight", None), "SCB", None)
        if isinstance(held, torch.Tensor):
            tensors.append(held)
    return sum(_unique_bytes(inner for tensor in tensors for inner in inner_tensors(tensor)))


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's numbers: those inside of a wrapper (torchao's), else itself."""
    if not _is_wrapper(tensor):
        return [tensor]
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same kind of tensor on the meta device."""
    if not _is_wrapper(tensor):
        return torch.empty_like(tensor, device="meta")
    names, context = cast(Any, tensor).__tensor_flatten__()
    inner = {name: without_values(getattr(tensor, name)) for name in names}
    return cast(Any, type(tensor)).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__")


def dequantise(module: nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The numbers of a linear's or embedding's weight, [out, in], as its forward uses them.

    Args:
        dtype: of the result; the default is the dtype in which the module computes.

    Raises:
        ValueError: the module has no weight, or one that can't be read.
    """
    if isinstance(module, Packed):
        return module.dequantise(dtype)
    weight = weight_of(module)
    kind = type(weight).__name__
    if kind == "Params4bit":
        wide = _dequantise_nf4(weight)
    elif kind == "Int8Params":
        wide = weight.data.float() * (int8_largest(module).float() / 127.0)[:, None]
    elif type(weight) not in (torch.Tensor, nn.Parameter) and hasattr(weight, "dequantize"):
        wide = weight.dequantize()
    elif weight.is_floating_point() and weight.element_size() >= 2:
        wide = weight.detach()
        if type(module).__name__ == "Conv1D":
            wide = wide.t()
    else:
        raise ValueError(f"the weight of a {type(module).__name__} ({weight.dtype}) can't be dequantised")
    return wide if dtype is None else wide.to(dtype)


def weight_of(module: nn.Module) -> torch.Tensor:
    """The stored weight of a module, whatever its kind; ValueError where there is none."""
    for name in ("weight", "qweight", "weight_packed"):
        weight = getattr(module, name, None)
        if isinstance(weight, torch.Tensor):
            return weight
    raise ValueError(f"a {type(module).__name__} has no weight")


def _subclass_bits(weight: torch.Tensor) -> float | None:
    """Width of a tensor subclass that says it (torchao)."""
    data = weight.data if isinstance(weight, nn.Parameter) else weight
    if type(data) in (torch.Tensor, nn.Parameter):
        return None
    # Numbers of few bits may lie in wider integers.
    target = re.fullmatch(r"torch\.u?int(\d+)", str(getattr(data, "target_dtype", None)))
    if target:
        return float(target[1])
    name = type(data).__name__.lower()
    if "int4" in name or "uint4" in name or "nf4" in name:
        return 4.0
    if "float8" in name or "int8" in name:
        return 8.0
    low, high = getattr(data, "quant_min", None), getattr(data, "quant_max", None)
    if isinstance(low, int | float) and isinstance(high, int | float):
        return float(int(high - low).bit_length())
    inner = getattr(data, "tensor_impl", None)
    stored = getattr(inner, "dtype", None)
    return 8.0 * stored.itemsize if isinstance(stored, torch.dtype) else None


def _dequantise_nf4(weight: torch.Tensor) -> torch.Tensor:
    from bitsandbytes import functional as bnb

    state = getattr(weight, "quant_state", None)
    if state is None:
        raise ValueError("a 4-bit weight has no quantisation state yet: move it to its device first")
    data = weight.data
    if getattr(state, "packing_format_for_cpu", False):
        # Laid out for a CPU kernel: codes back in their order, scales as that kernel uses them.
        state = copy.copy(state)
        scales = state.absmax.t().float().reshape(-1).contiguous()
        state.original_nested = False
        data, state = bnb._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax = scales
    return bnb.dequantize_4bit(data, state)


def int8_largest(linear: nn.Module) -> torch.Tensor:
    """What the code 127 stands for in each row of bitsandbytes' 8-bit linear, [out].

    Raises:
        ValueError: it isn't quantised yet.
    """
    # It moves to the module's state at the first forward.
    largest = getattr(linear.weight, "SCB", None)
    if largest is None:
        largest = getattr(getattr(linear, "state", None), "SCB", None)
    if largest is None:
        raise ValueError("an 8-bit weight has no scales yet: move it to its device first")
    return cast(torch.Tensor, largest)


def _state_tensors(state: Any) -> list[torch.Tensor]:
    found = [
        value for name in ("absmax", "code", "offset") if isinstance(value := getattr(state, name, None), torch.Tensor)
    ]
    nested = getattr(state, "state2", None)
    return found + (_state_tensors(nested) if nested is not None else [])


def _unique_bytes(tensors: Iterable[torch.Tensor]) -> Iterable[int]:
    seen: set[int] = set()
    for tensor in tensors:
        key = tensor.data_ptr() if tensor.device.type != "meta" and tensor.numel() else id(tensor)
        if key not in seen:
            seen.add(key)
            yield tensor.numel() * tensor.element_size()
