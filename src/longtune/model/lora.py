"""The LoRA layer: y = base(x) + s * dropout(x) A^T B^T, with fp32 masters and no fp32 copy of x.

PEFT's own layer casts its input to the dtype of A and B. With fp32 masters in a bfloat16 model that makes an fp32
copy of every linear's input and output, the largest tensors of a layer. Here the small A and B are cast instead. All
the rest (names, configuration, files, merging, other variants) stays PEFT's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from torch.nn import functional as F

from longtune.model.expert_lora import lean_stack
from longtune.model.experts import stack_owners
from longtune.model.members import modules_of
from longtune.model.packed import PackedLinear, dequantise
from longtune.model.packed.modules import frozen_linear
from longtune.model.triton_here import triton_fault

Numbers = torch.Tensor | Callable[[torch.dtype], torch.Tensor]
"""A frozen weight [out, in], or what gives it in a dtype."""


class _Part(NamedTuple):
    """One linear of a lean product.

    Attributes:
        down_RI, up_OR: A and B in the dtype of x.
        bias: the base's [O], or None.
        numbers: the base's weight.
        scale: s.
        unread: its values are not wanted.
    """

    down_RI: torch.Tensor
    up_OR: torch.Tensor
    bias: torch.Tensor | None
    numbers: Numbers
    scale: float
    unread: bool


class LeanLinear(lora.Linear):
    """PEFT's LoRA linear, computed in the dtype of its input.

    Only the plain case is computed here: one active adapter, neither merged nor disabled, no variant (DoRA, ...), no
    bias in B, no autocast. Anything else is left to PEFT's forward.

    Attributes:
        unread: nobody reads the values of the next outputs: only gradients pass through them (set by the engine for a
            while). They are then not computed, where that can be had.
        followers: linears that are called next with the very input of this one (queries, keys and values; gate and
            up). Their outputs are computed together with this one's: the input is read once by all their A, and its
            gradient is summed where it is made. Set by `join`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.unread = False
        self.followers: tuple[LeanLinear, ...] = ()
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None
        """What the linear that this one follows has computed: its input, and the output of this one."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., in] -> [..., out], both in the dtype of x. Gradients reach A and B in their own dtype."""
        ready, self._given = self._given, None
        if ready is not None and ready[0] is x:
            return ready[1]
        name = self._plain_adapter()
        if name is None or args or kwargs or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x, *args, **kwargs)
        part = self._part(x.dtype)
        if part is None:
            return self._beside_its_base(x, name)
        following = [(other, other._part(x.dtype)) for other in self.followers]
        parts = [part, *(p for _, p in following if p is not None)]
        if len(parts) != 1 + len(following):
            following, parts = [], [part]
        given = all(isinstance(p.numbers, torch.Tensor) for p in parts)
        outputs = (_lean if given else cast(Any, _made_lean))(x.reshape(-1, x.shape[-1]), parts)
        first, *others = (y_NO.view(*x.shape[:-1], y_NO.shape[-1]) for y_NO in outputs)
        for (other, _), output in zip(following, others, strict=True):
            other._given = x, output
        return first

    def _part(self, dtype: torch.dtype) -> _Part | None:
        """What is to be computed, with A and B in a dtype; None where only modules can."""
        name, numbers = self._plain_adapter(), self._numbers()
        if name is None or numbers is None or not isinstance(self.lora_dropout[name], nn.Identity):
            return None
        down_RI = cast(nn.Linear, self.lora_A[name]).weight.to(dtype)
        up_OR = cast(nn.Linear, self.lora_B[name]).weight.to(dtype)
        return _Part(down_RI, up_OR, cast(nn.Linear, self.base_layer).bias, numbers, self.scaling[name], self.unread)

    def _beside_its_base(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """With dropout between x and A, or a base that only its module can compute with."""
        down_RI = cast(nn.Linear, self.lora_A[name]).weight.to(x.dtype)
        up_OR = cast(nn.Linear, self.lora_B[name]).weight.to(x.dtype)
        x_NI = x.reshape(-1, x.shape[-1])
        base, numbers = cast(nn.Linear, self.base_layer), self._numbers()
        # bitsandbytes' own forward may answer with a view, which can't be added to in place. This is the same
        # product with the same numbers.
        y_NO = base(x_NI) if not callable(numbers) else frozen_linear(x_NI, numbers, base.bias)
        # In place: a frozen linear doesn't need its output again, and a second [N, out] would be the layer's peak.
        y_NO.addmm_(F.linear(self.lora_dropout[name](x_NI), down_RI), up_OR.t(), alpha=self.scaling[name])
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


class _LeanProducts(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T for some linears with frozen W and one x, with one [N, in] for the gradient of x.

    Without values (`unread`) a result is a placeholder of y's shape that takes no memory; gradients are the same.
    """

    @staticmethod
    def forward(ctx, x_NI, scales, unread, makers, *tensors):  # pyright: ignore[reportIncompatibleMethodOverride]
        n = len(scales)
        downs, ups, biases, weights = (tensors[i * n : (i + 1) * n] for i in range(4))
        down_SI = downs[0] if n == 1 else torch.cat(downs)
        wanted = [i for i in range(n) if not unread[i]]
        made = [weights[i] if makers[i] is None else makers[i](x_NI.dtype) for i in wanted]
        low_NS = F.linear(x_NI, down_SI)
        lows = low_NS.split([down.shape[0] for down in downs], 1)
        scaled = [lows[i] * scales[i] for i in wanted]
        outputs = _outputs_op if torch.compiler.is_compiling() else _outputs
        found = outputs(x_NI, scaled, [ups[i] for i in wanted], [biases[i] for i in wanted], made)
        nothing = x_NI.new_zeros(()) if len(wanted) < n else None
        results: list[Any] = [None if nothing is None else nothing.expand(x_NI.shape[0], up.shape[0]) for up in ups]
        for i, y_NO in zip(wanted, found, strict=True):
            results[i] = y_NO
        ctx.scales, ctx.makers = scales, makers
        ctx.save_for_backward(x_NI, down_SI, low_NS, *ups, *weights)
        return tuple(results)

    @staticmethod
    def backward(ctx, *douts):  # pyright: ignore[reportIncompatibleMethodOverride]
        n = len(ctx.scales)
        x_NI, down_SI, low_NS, *rest = ctx.saved_tensors
        ups, weights = rest[:n], rest[n:]
        ranks = [up.shape[1] for up in ups]
        lows = low_NS.split(ranks, 1)
        found = [_up_gradients_of(*part) for part in zip(douts, ups, lows, ctx.scales, strict=True)]
        dlow_NS = found[0][0] if n == 1 else torch.cat([dlow for dlow, _ in found], 1)
        dx_NI = None
        if ctx.needs_input_grad[0]:
            made = [w if maker is None else maker(x_NI.dtype) for w, maker in zip(weights, ctx.makers, strict=True)]
            input_gradient = _input_gradient_op if torch.compiler.is_compiling() else _input_gradient
            dx_NI = input_gradient(list(douts), made, dlow_NS, down_SI)
        ddowns = (dlow_NS.t() @ x_NI).split(ranks)
        return dx_NI, None, None, None, *ddowns, *(dup for _, dup in found), *[None] * (2 * n)


# The small product goes first: it only writes, and the large one adds to it while it computes. The other way round the
# small product reads and writes the large one's result, at the rate of memory.


def _outputs(
    x_NI: torch.Tensor,
    lows: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """x W^T + b + low B^T [N, O] for each low [N, R] (scaled), B [O, R], b [O] and W [O, I]."""
    found = []
    for low_NR, up_OR, bias, weight_OI in zip(lows, ups, biases, weights, strict=True):
        if bias is None and _kernels_take(low_NR, up_OR):
            from longtune.model.lora_kernels import expand

            y_NO = expand(low_NR, up_OR)
        else:
            y_NO = F.linear(low_NR, up_OR, None if bias is None else bias.to(x_NI.dtype))
        found.append(y_NO.addmm_(x_NI, weight_OI.t()))
    return found


def _input_gradient(
    douts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], dlow_NS: torch.Tensor, down_SI: torch.Tensor
) -> torch.Tensor:
    """dlow A + the sum of dy W [N, I]."""
    dx_NI = dlow_NS @ down_SI
    for dy_NO, weight_OI in zip(douts, weights, strict=True):
        dx_NI.addmm_(dy_NO, weight_OI)
    return dx_NI


def _up_gradients_of(
    dy_NO: torch.Tensor, up_OR: torch.Tensor, low_NR: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """s dy B [N, R] and s dy^T low [O, R], of s B low with low = A x."""
    compiled = torch.compiler.is_compiling() and _may_be_taken(dy_NO, up_OR)
    return (_up_gradients_op if compiled else _up_gradients)(dy_NO, up_OR, low_NR, scale)


def _up_gradients(
    dy_NO: torch.Tensor, up_OR: torch.Tensor, low_NR: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not torch.compiler.is_compiling() and _kernels_take(dy_NO, up_OR):
        from longtune.model.lora_kernels import up_gradients

        dlow_NR, dup_OR = up_gradients(dy_NO, up_OR, low_NR)
        return (dlow_NR * scale).to(dy_NO.dtype), (dup_OR * scale).to(up_OR.dtype)
    return (dy_NO @ up_OR) * scale, (dy_NO.t() @ low_NR) * scale


_WIDE, _MANY, _RANK = 8192, 4096, 16
"""Outputs and tokens from which on the kernels are faster than a library's products, and their largest rank (measured
on an H200: docs/kernels.md)."""


def _may_be_taken(rows: torch.Tensor, up_OR: torch.Tensor) -> bool:
    """What a compiler knows of `_kernels_take`."""
    half = rows.dtype in (torch.bfloat16, torch.float16)
    return rows.is_cuda and half and up_OR.shape[0] >= _WIDE and up_OR.shape[1] <= _RANK


def _kernels_take(rows: torch.Tensor, up_OR: torch.Tensor) -> bool:
    """Whether the skinny products of B and some rows [N, ...] go to Triton's kernels."""
    if not _may_be_taken(rows, up_OR) or rows.shape[0] < _MANY:
        return False
    return rows.is_contiguous() and up_OR.is_contiguous() and triton_fault(rows.device) is None


# A compiler would copy the first product's result before it adds the second's to it: compiled layers call these whole.
_outputs_op = torch.library.custom_op("longtune::lora_outputs", _outputs, mutates_args=())
_input_gradient_op = torch.library.custom_op("longtune::lora_input_gradient", _input_gradient, mutates_args=())
_up_gradients_op = torch.library.custom_op("longtune::lora_up_gradients", _up_gradients, mutates_args=())


@_outputs_op.register_fake
def _(x_NI, lows, ups, biases, weights):
    return [x_NI.new_empty(x_NI.shape[0], up_OR.shape[0]) for up_OR in ups]


@_input_gradient_op.register_fake
def _(douts, weights, dlow_NS, down_SI):
    return dlow_NS.new_empty(dlow_NS.shape[0], down_SI.shape[1])


@_up_gradients_op.register_fake
def _(dy_NO, up_OR, low_NR, scale):
    return dy_NO.new_empty(dy_NO.shape[0], up_OR.shape[1]), torch.empty_like(up_OR)


def _lean(x_NI: torch.Tensor, parts: Sequence[_Part]) -> tuple[torch.Tensor, ...]:
    given = [p.numbers if isinstance(p.numbers, torch.Tensor) else None for p in parts]
    makers = tuple(None if isinstance(p.numbers, torch.Tensor) else p.numbers for p in parts)
    return cast(Any, _LeanProducts.apply)(
        x_NI,
        tuple(p.scale for p in parts),
        tuple(p.unread for p in parts),
        makers,
        *(p.down_RI for p in parts),
        *(p.up_OR for p in parts),
        *(p.bias for p in parts),
        *given,
    )


# A compiled layer leaves its graph here: what is dequantised, kept for a while, or made again is no part of it.
_made_lean = torch.compiler.disable(_lean)


@contextmanager
def joining(module: nn.Module) -> Iterator[None]:
    """Around one forward of a module: linears inside that are called one after another with one input are joined, so
    that from the next forward on they are computed together (`LeanLinear.followers`)."""
    calls: list[tuple[LeanLinear, torch.Tensor, int]] = []
    """With the input's version: who changes it in between, makes another one of it."""

    def called(linear: LeanLinear, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        calls.append((linear, x, x._version) if isinstance(x, torch.Tensor) else (linear, torch.empty(0), 0))

    inside = [m for m in modules_of(module) if isinstance(m, LeanLinear)]
    handles = [linear.register_forward_pre_hook(called) for linear in inside]
    for linear in inside:
        linear.followers = ()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    once = Counter(linear for linear, _, _ in calls)
    groups = [[calls[0]]] if calls else []
    for call in calls[1:]:
        _, x, version = groups[-1][0]
        if call[1] is x and call[2] == version:
            groups[-1].append(call)
        else:
            groups.append([call])
    for group in groups:
        first, *others = (linear for linear, _, _ in group)
        if all(once[linear] == 1 for linear in (first, *others)):
            first.followers = tuple(others)


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
