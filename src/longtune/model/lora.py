"""The LoRA layer: y = base(x) + s * dropout(x) A^T B^T, with fp32 masters and no fp32 copy of x.

PEFT's own layer casts its input to the dtype of A and B. With fp32 masters in a bfloat16 model that makes an fp32
copy of every linear's input and output, the largest tensors of a layer. Here the small A and B are cast instead. All
the rest (names, configuration, files, merging, other variants) stays PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from torch.nn import functional as F

from longtune.model.expert_lora import lean_stack
from longtune.model.experts import stack_owners
from longtune.model.packed import PackedLinear, dequantise
from longtune.model.packed.modules import frozen_linear

Numbers = torch.Tensor | Callable[[torch.dtype], torch.Tensor]
"""A frozen weight [out, in], or what gives it in a dtype."""


class LeanLinear(lora.Linear):
    """PEFT's LoRA linear, computed in the dtype of its input.

    Only the plain case is computed here: one active adapter, neither merged nor disabled, no variant (DoRA, ...), no
    bias in B, no autocast. Anything else is left to PEFT's forward.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.unread = False
        """Nobody reads the values of the next outputs: only gradients pass through them (set by the engine for a
        while). They are then not computed, where that can be had."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., in] -> [..., out], both in the dtype of x. Gradients reach A and B in their own dtype."""
        name = self._plain_adapter()
        if name is None or args or kwargs or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x, *args, **kwargs)
        down_RI = cast(nn.Linear, self.lora_A[name]).weight.to(x.dtype)
        up_OR = cast(nn.Linear, self.lora_B[name]).weight.to(x.dtype)
        x_NI = x.reshape(-1, x.shape[-1])
        dropout = self.lora_dropout[name]
        base, numbers = cast(nn.Linear, self.base_layer), self._numbers()
        if isinstance(dropout, nn.Identity) and numbers is not None:
            bias, scale = base.bias, self.scaling[name]
            product = _lean if isinstance(numbers, torch.Tensor) else cast(Any, _made_lean)
            y_NO = product(x_NI, down_RI, up_OR, bias, numbers, scale, self.unread)
        else:
            # bitsandbytes' own forward may answer with a view, which can't be added to in place. This is the same
            # product with the same numbers.
            y_NO = base(x_NI) if not callable(numbers) else frozen_linear(x_NI, numbers, base.bias)
            # In place: a frozen linear doesn't need its output again, and a second [N, out] would be the layer's peak.
            y_NO.addmm_(F.linear(dropout(x_NI), down_RI), up_OR.t(), alpha=self.scaling[name])
        return y_NO.view(*x.shape[:-1], y_NO.shape[-1])

    def _numbers(self) -> Numbers | None:
        """The frozen weight below [out, in], or what makes it; None where only its module can compute with it."""
        base = cast(nn.Linear, self.base_layer)
        if isinstance(base, PackedLinear):
            return base.numbers
        if _is_4bit(base):
            return lambda dtype: dequantise(base, dtype)
        plain = type(base.weight) in (torch.Tensor, nn.Parameter) and base.weight.is_floating_point()
        frozen = not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)
        return base.weight if plain and frozen else None

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int] | tuple[None, None]:
        if isinstance(module, PackedLinear):
            return module.in_features, module.out_features  # PEFT would warn that it doesn't know the class.
        return super()._get_in_out_features(module)

    def _plain_adapter(self) -> str | None:
        """The one adapter to compute, or None where PEFT's forward must decide."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        name = self.active_adapters[0]
        if name not in self.lora_A or name in self.lora_variant or self.lora_bias[name]:
            return None
        return name


class _LeanProduct(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T for a frozen W, with one [N, in] for the gradient of x.

    Without values (`unread`) the result is a placeholder of y's shape that takes no memory; gradients are the same.
    """

    @staticmethod
    def forward(ctx, x_NI, down_RI, up_OR, bias, numbers, scale, unread):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.scale = scale
        given = isinstance(numbers, torch.Tensor)
        ctx.numbers = None if given else numbers
        if unread:
            y_NO = x_NI.new_zeros(()).expand(x_NI.shape[0], up_OR.shape[0])
            low_NR = F.linear(x_NI, down_RI)
        else:
            values = _values_op if torch.compiler.is_compiling() else _values
            y_NO, low_NR = values(x_NI, down_RI, up_OR, bias, numbers if given else numbers(x_NI.dtype), scale)
        ctx.save_for_backward(x_NI, down_RI, up_OR, low_NR, numbers if given else None)
        return y_NO

    @staticmethod
    def backward(ctx, dy_NO):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NI, down_RI, up_OR, low_NR, weight_OI = ctx.saved_tensors
        dlow_NR = (dy_NO @ up_OR) * ctx.scale
        dx_NI = None
        if ctx.needs_input_grad[0]:
            input_gradient = _input_gradient_op if torch.compiler.is_compiling() else _input_gradient
            weight_OI = ctx.numbers(dy_NO.dtype) if weight_OI is None else weight_OI
            dx_NI = input_gradient(dy_NO, weight_OI, dlow_NR, down_RI)
        dup_OR = (dy_NO.t() @ low_NR) * ctx.scale
        return dx_NI, dlow_NR.t() @ x_NI, dup_OR, None, None, None, None


# The small product goes first: it only writes, and the large one adds to what is there while it computes. The other
# way round the small product reads and writes the large one's result, at the rate of memory.


def _values(
    x_NI: torch.Tensor,
    down_RI: torch.Tensor,
    up_OR: torch.Tensor,
    bias: torch.Tensor | None,
    weight_OI: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x W^T + b + s (x A^T) B^T [N, out] and x A^T [N, R]."""
    low_NR = F.linear(x_NI, down_RI)
    y_NO = F.linear(low_NR * scale, up_OR, None if bias is None else bias.to(x_NI.dtype))
    return y_NO.addmm_(x_NI, weight_OI.t()), low_NR


def _input_gradient(
    dy_NO: torch.Tensor, weight_OI: torch.Tensor, dlow_NR: torch.Tensor, down_RI: torch.Tensor
) -> torch.Tensor:
    """dy W + dlow A [N, in]."""
    return (dlow_NR @ down_RI).addmm_(dy_NO, weight_OI)


# A compiler would copy the first product's result before it adds the second's to it: compiled layers call these whole.
_values_op = torch.library.custom_op("longtune::lora_values", _values, mutates_args=())
_input_gradient_op = torch.library.custom_op("longtune::lora_input_gradient", _input_gradient, mutates_args=())


@_values_op.register_fake
def _(x_NI, down_RI, up_OR, bias, weight_OI, scale):
    return x_NI.new_empty(x_NI.shape[0], up_OR.shape[0]), x_NI.new_empty(x_NI.shape[0], down_RI.shape[0])


@_input_gradient_op.register_fake
def _(dy_NO, weight_OI, dlow_NR, down_RI):
    return dy_NO.new_empty(dy_NO.shape[0], down_RI.shape[1])


def _lean(*args: Any) -> torch.Tensor:
    return cast(torch.Tensor, _LeanProduct.apply(*args))


# A compiled layer leaves its graph here: what is dequantised, kept for a while, or made again is no part of it.
_made_lean = torch.compiler.disable(_lean)


def use_lean_layers(config: LoraConfig, model: nn.Module) -> LoraConfig:
    """Make PEFT build `LeanLinear` for `nn.Linear`, packed and 4-bit linears, and `expert_lora.ParamWrapper` for stacks
    of experts; for others its own choice stands.

    PEFT's registry of custom modules lives in the configuration object: nothing global changes, and nothing of
    it is saved with the adapter.

    Args:
        model: which the adapter is for.
    """
    made: dict[type[nn.Module], Any] = {nn.Linear: _lean_or_default, PackedLinear: _lean_or_default}
    made |= {type(owner): lean_stack for owner in stack_owners(model)}
    config._register_custom_module(made)  # pyright: ignore[reportArgumentType]
    return config


def _lean_or_default(target: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> LeanLinear | None:
    """PEFT's constructor call; None hands the layer to PEFT's own dispatch."""
    base = target.get_base_layer() if isinstance(target, lora.LoraLayer) else target
    if not (type(base) in (nn.Linear, PackedLinear) or _is_4bit(base)) or config.use_dora:
        return None
    return LeanLinear(target, adapter_name, config=config, **kwargs)


def _is_4bit(module: nn.Module) -> bool:
    """A bitsandbytes 4-bit linear (its class is known by name: the package may not be there)."""
    return type(module).__name__ == "Linear4bit" and type(module.weight).__name__ == "Params4bit"
