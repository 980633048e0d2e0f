"""LoRA on stacks of experts: what PEFT's wrapper computes, without a second stack.

PEFT forms W + s B A for all experts in every forward, and its backward a gradient of that size; in half precision the
small update is rounded away in the sum. Here the update stays two thin factors: while the experts' own forward runs,
each adapted tensor is replaced by an `Adapted`, whose products are x W + s (x A) B. All the rest stays PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from longtune.model.experts import is_transposed, split

_ALIGNMENT = 16
"""Bytes that rows are a multiple of in grouped products."""


class ParamWrapper(lora.ParamWrapper):
    """PEFT's wrapper of one tensor, computed without forming W + s B A.

    It has the name of its parent since PEFT asks for that name. As in `lora.LeanLinear` only one active adapter,
    neither merged nor disabled, is computed here; anything else is left to PEFT's forward.
    """

    # A compiled layer leaves its graph here, as it does for experts anyhow: which tokens they get is not known before.
    @torch.compiler.disable
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the experts' own forward gives with the adapted tensors of all nested wrappers."""
        stand_ins = self._stand_ins()
        if stand_ins is None:
            return super().forward(x, *args, **kwargs)
        experts = cast(nn.Module, self.get_base_layer())
        held = vars(experts)  # Looked at before the module's parameters.
        held.update(stand_ins)
        try:
            return experts(x, *args, **kwargs)
        finally:
            for name in stand_ins:
                del held[name]

    def _stand_ins(self) -> dict[str, Adapted] | None:
        """By parameter name what stands for it; None where PEFT's forward must decide."""
        found: dict[str, Adapted] = {}
        for wrapper in self._nested():
            if wrapper.disable_adapters or wrapper.merged or len(wrapper.active_adapters) != 1:
                return None
            name, weight = wrapper.active_adapters[0], wrapper.get_param()
            if name not in wrapper.lora_A or not isinstance(weight, torch.Tensor) or weight.element_size() < 2:
                return None
            down, up = (
                cast(nn.Linear, half[name]).weight.to(weight.dtype) for half in (wrapper.lora_A, wrapper.lora_B)
            )
            right, left = split(down, up, weight.shape[0])
            left = left.contiguous()
            if is_transposed(cast(nn.Module, self.get_base_layer())):
                left, right = right.mT, left.mT
            found[wrapper.parameter_name] = Adapted(weight, left, right, wrapper.scaling[name])
        return found

    def _nested(self) -> Iterator[lora.ParamWrapper]:
        layer: Any = self
        while isinstance(layer, lora.ParamWrapper):
            yield layer
            layer = layer.base_layer


def lean_stack(target: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> ParamWrapper | None:
    """PEFT's constructor call for a module with stacks; None, where no parameter is meant, leaves it to PEFT."""
    if kwargs.get("parameter_name") is None:
        return None
    return ParamWrapper(target, adapter_name, config=config, **kwargs)


class Adapted:
    """W + s L R that is not formed, where W is [..., rows, columns], L [..., rows, rank] and R [..., rank, columns].

    It may be indexed, transposed, and stand in linears and matrix products. Whatever else is asked of it is asked of
    the sum, which is formed then.
    """

    def __init__(self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float):
        self.weight, self.left, self.right, self.scale = weight, left, right, scale
        self._experts: list[tuple[torch.Tensor, torch.Tensor]] = []

    shape = property(lambda self: self.weight.shape)
    dtype = property(lambda self: self.weight.dtype)
    device = property(lambda self: self.weight.device)
    ndim = property(lambda self: self.weight.ndim)

    def data_ptr(self) -> int:
        return self.weight.data_ptr()

    def formed(self) -> torch.Tensor:
        """The sum, a new tensor."""
        return self.weight + self.scale * (self.left @ self.right)

    def __getitem__(self, chosen: Any) -> Adapted:
        one = isinstance(chosen, int) or (isinstance(chosen, torch.Tensor) and chosen.ndim == 0)
        if not one:
            return Adapted(self.weight[chosen], self.left[chosen], self.right[chosen], self.scale)
        if not self._experts:
            # One node of the graph for all experts: indexing gives each a gradient as large as the whole.
            self._experts = list(zip(self.left.unbind(), self.right.unbind(), strict=True))
        # A number without a value stands for any expert: a plan is being made, and they are of one size.
        known = not isinstance(chosen, torch.Tensor) or not chosen.is_meta
        e = int(chosen) if known else 0
        return Adapted(self.weight[e], *self._experts[e], self.scale)

    def transpose(self, a: int, b: int) -> Adapted | torch.Tensor:
        if {a % self.ndim, b % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            return self.formed().transpose(a, b)
        return Adapted(self.weight.mT, self.right.mT, self.left.mT, self.scale)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.formed(), name)

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(cast(Any, self), x)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(args) >= 2 and not isinstance(args[0], Adapted) and isinstance(args[1], Adapted):
            x, adapted = args[:2]
            if func is F.linear:
                y = F.linear(x, adapted.weight, *args[2:], **kwargs)
                return adapted._onto(y, F.linear(x, adapted.right), adapted.left.mT)
            if func in _PRODUCTS and not kwargs:
                return adapted._onto(func(x, adapted.weight), func(x, adapted.left), adapted.right)
            if func in _GROUPED:
                y = func(x, adapted.weight, *args[2:], **kwargs)
                left, right = adapted._aligned()
                low = func(x, left, *args[2:], **kwargs)
                return y.add_(func(low, right, *args[2:], **kwargs), alpha=adapted.scale)
        formed, named = tree_map(_formed, (args, kwargs))
        return func(*formed, **named)

    def _onto(self, y: torch.Tensor, low: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """y + s low right, in place: a product with frozen weights doesn't need its result again."""
        if y.ndim == 2:
            return y.addmm_(low, right, alpha=self.scale)
        return y.add_(low @ right, alpha=self.scale)

    def _aligned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """L and R with zeros to a rank whose rows are aligned, laid out by rows."""
        more = -self.left.shape[-1] % (_ALIGNMENT // self.left.element_size())
        return F.pad(self.left, (0, more)).contiguous(), F.pad(self.right, (0, 0, 0, more)).contiguous()


def _formed(x: Any) -> Any:
    return x.formed() if isinstance(x, Adapted) else x


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
_GROUPED = tuple(
    found for found in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if found is not None
)
