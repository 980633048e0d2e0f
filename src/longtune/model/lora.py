"""The LoRA layer: y = base(x) + s * dropout(x) A^T B^T, with fp32 masters and no fp32 copy of x.

PEFT's own layer casts its input to the dtype of A and B. With fp32 masters in a bfloat16 model that makes an fp32
copy of every linear's input and output, the largest tensors of a layer. Here the small A and B are cast instead. All
the rest (names, configuration, files, merging, other variants) stays PEFT's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from torch.nn import functional as F

from longtune.model.packed import PackedLinear, dequantise
from longtune.model.packed.modules import frozen_linear


class LeanLinear(lora.Linear):
    """PEFT's LoRA linear, computed in the dtype of its input.

    Only the plain case is computed here: one active adapter, neither merged nor disabled, no variant (DoRA, ...), no
    bias in B, no autocast. Anything else is left to PEFT's forward.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., in] -> [..., out], both in the dtype of x. Gradients reach A and B in their own dtype."""
        name = self._plain_adapter()
        if name is None or args or kwargs or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x, *args, **kwargs)
        down_RI = cast(nn.Linear, self.lora_A[name]).weight.to(x.dtype)
        up_OR = cast(nn.Linear, self.lora_B[name]).weight.to(x.dtype)
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO = self._base(x_NI)
        low_NR = F.linear(self.lora_dropout[name](x_NI), down_RI)
        # In place: a frozen linear doesn't need its output again, and a second [N, out] would be the peak of the layer.
        y_NO.addmm_(low_NR, up_OR.t(), alpha=self.scaling[name])
        return y_NO.view(*x.shape[:-1], y_NO.shape[-1])

    def _base(self, x_NI: torch.Tensor) -> torch.Tensor:
        """What the frozen layer below gives; a new tensor that nobody else holds."""
        base = cast(nn.Linear, self.base_layer)
        if _is_4bit(base):
            # bitsandbytes' own forward may answer with a view, which can't be added to in place. This is the same
            # product with the same numbers.
            return frozen_linear(x_NI, lambda dtype: dequantise(base, dtype), base.bias)
        return base(x_NI)

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


def use_lean_layers(config: LoraConfig) -> LoraConfig:
    """Make PEFT build `LeanLinear` for `nn.Linear`, packed and 4-bit linears; for others its own choice stands.

    PEFT's registry of custom modules lives in the configuration object: nothing global changes, and nothing of
    it is saved with the adapter.
    """
    made = {nn.Linear: _lean_or_default, PackedLinear: _lean_or_default}
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
