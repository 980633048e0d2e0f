"""The weights of a model that can be quantised, one by one, under the names that they have in MLX's files.

Linears, embeddings, the head, and the gate, up and down stacks of fused experts. What a width costs is asked in
`sensitivity`, and decided in `widths`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from longtune.errors import Problem, UserError
from longtune.model.packed.formats import Format
from longtune.model.packed.modules import PackedWeight
from longtune.model.packed.quantiser import Quantised, quantise
from longtune.model.packed.storage import is_quantised
from longtune.model.stack import find_layers

BEFORE = -1
"""`Unit.layer` of what comes before the layers."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One weight.

    Attributes:
        name: the module's path in MLX's model.
        parameter: its parameter's name in the transformers model; fused experts share one.
        layer: the decoder layer it lies in, `BEFORE` for an embedding, or the number of layers for a head of its own.
        shape: of the numbers, [*, out, in].
        rows: which rows (the last axis but one) of the parameter are this unit's; None for all.
    """

    name: str
    parameter: str
    layer: int
    shape: tuple[int, ...]
    rows: slice | None = None
    _owner: nn.Module = field(repr=False, compare=False, kw_only=True)

    @property
    def numbers(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def weight(self) -> torch.Tensor:
        """The numbers as they are now; writing into it changes the model."""
        whole = cast(torch.Tensor, getattr(self._owner, self.parameter.rpartition(".")[2])).detach()
        return whole if self.rows is None else whole[..., self.rows, :]

    def quantised(self, format: Format) -> Quantised:
        """The packed weight; scales in the weight's dtype.

        Raises:
            UserError: the weight holds values that are not finite.
        """
        try:
            return quantise(self.weight, format)
        except ValueError as error:
            raise UserError(Problem(self.name, str(error), "look for damaged weights")) from error

    @contextmanager
    def exchanged(self, format: Format) -> Iterator[None]:
        """The model with this unit alone quantised."""
        with torch.no_grad():
            weight = self.weight
            kept = weight.clone()
            packed = self.quantised(format)
            made = PackedWeight(
                format, self.shape[-1], packed.weight, packed.scales, packed.biases, compute_dtype=weight.dtype
            )
            weight.copy_(made.dequantise())
            try:
                yield
            finally:
                weight.copy_(kept)


def find_units(model: PreTrainedModel, group_size: int) -> tuple[list[Unit], dict[str, str]]:
    """All units of a model in the order of its modules, and by name the reason why some stay as they are.

    A tied head is no unit of its own.

    Args:
        group_size: of the affine format that is meant; a row that it doesn't divide can't be quantised.

    Raises:
        UserError: the model is quantised already, has parts that MLX's layout has no place for here, or no row that
            the group size divides.
    """
    _check(model)
    _, layers, _, layers_name = find_layers(model)
    count = len(layers)
    head = model.get_output_embeddings()
    units: list[Unit] = []
    left: dict[str, str] = {}
    seen: set[int] = set()
    widths: set[int] = set()
    for path, module in model.named_modules():
        for name, owner, parameter, rows in _weights(path, module):
            whole = cast(nn.Parameter, getattr(owner, parameter))
            if rows is None and id(whole) in seen:
                continue
            seen.add(id(whole))
            shape = tuple(whole.shape if rows is None else whole[..., rows, :].shape)
            widths.add(shape[-1])
            if shape[-1] % group_size:
                left[name] = f"groups of {group_size} don't divide its rows of {shape[-1]}"
                continue
            inside = path.startswith(f"{layers_name}.")
            layer = int(path[len(layers_name) + 1 :].split(".", 1)[0]) if inside else BEFORE
            if module is head:
                layer = count
            units.append(Unit(name, f"{path}.{parameter}", layer, shape, rows, _owner=owner))
    if not units:
        raise _nothing_divided(group_size, widths)
    return units, left


def _nothing_divided(group_size: int, widths: set[int]) -> UserError:
    rows = ", ".join(str(width) for width in sorted(widths))
    reason = f"divides the rows of no module (of {rows} numbers), so nothing would be quantised"
    # MLX's own sizes first, then whatever goes into all rows.
    common = math.gcd(*widths)
    fitting = next((size for size in (64, 128, 32) if common % size == 0), common)
    return UserError(Problem(f"group size {group_size}", reason, f"use {fitting}"))


def _check(model: PreTrainedModel) -> None:
    place = type(model).__name__
    if model.config.get_text_config() is not model.config:
        raise UserError(Problem(place, "is more than a language model", "quantise the text model inside it alone"))
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight) or (isinstance(module, nn.Linear) and is_quantised(module)):
            raise UserError(Problem(f"{place}: {name}", "is quantised already", "start from the plain weights"))
        if isinstance(module, Conv1D):
            reason = "is a linear whose weight is stored transposed, which MLX's layout has no place for"
            raise UserError(Problem(f"{place}: {name}", reason, "quantise another model"))


def _weights(path: str, module: Any) -> Iterator[tuple[str, nn.Module, str, slice | None]]:
    """(name in MLX's model, owner, parameter, rows) of the weights that a module itself holds."""
    if isinstance(module, nn.Linear | nn.Embedding):
        yield path, module, "weight", None
    elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
        if module.is_transposed or module.has_bias or not module.is_concatenated:
            reason = "its experts are laid out in a way that can't be written in MLX's layout"
            raise UserError(Problem(path, reason, "quantise another model"))
        stack = f"{path.rpartition('.')[0]}.switch_mlp"
        half = module.gate_up_proj.shape[1] // 2
        yield f"{stack}.gate_proj", module, "gate_up_proj", slice(0, half)
        yield f"{stack}.up_proj", module, "gate_up_proj", slice(half, None)
        yield f"{stack}.down_proj", module, "down_proj", None
