"""What a model's head computes: a matrix and what follows it, learnt by asking the model.

Gemma-style heads bend the logits with a softcap, others scale them. `read_form` proposes a closed form and checks it
against the model's own logits; where none fits, the head is run through the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from longtune.head.matrix import DenseMatrix, Matrix, Packed, PackedMatrix
from longtune.model.packed import PackedLinear, TiedHead
from longtune.model.stack import Stack


@dataclass(frozen=True, slots=True)
class HeadForm:
    """logits = cap(scale * (h W^T + b)), cap(z) = softcap * tanh(z / softcap) where softcap is given.

    Attributes:
        weight: [V, H], or the packed words where `packed` is given. bias: [V] or None.
        packed: the module that dequantises rows of the matrix, where it is packed.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    packed: Packed | None = None

    @property
    def matrix(self) -> Matrix:
        return DenseMatrix(self.weight.detach()) if self.packed is None else PackedMatrix(self.packed)


def read_form(stack: Stack, *, trained: bool = False, packed: bool = False) -> HeadForm | None:
    """The closed form of the model's head, or None where there is none.

    Args:
        trained: take a head whose matrix or bias is trained too, instead of answering None for it.
        packed: take a head whose matrix is packed too.
    """
    head = stack.head_module
    source = cast(Packed, head) if packed and isinstance(head, PackedLinear | TiedHead) else None
    if source is None and (type(head) is not nn.Linear or not head.weight.is_floating_point()):
        return None
    learning = [p for p in stack.head_parameters if p.requires_grad]
    if learning and not (trained and all(p is head.weight or p is head.bias for p in learning)):
        return None
    cap = getattr(stack.model.config.get_text_config(), "final_logit_softcapping", None)
    weight, bias = cast(torch.Tensor, head.weight), cast(torch.Tensor | None, head.bias)
    form = HeadForm(weight, bias, packed=source)
    if weight.is_meta:
        return replace(form, softcap=cap)  # No values to try: the config is believed.
    hidden = _probes(form, stack.dtype if source else weight.dtype, cap)
    with torch.no_grad():
        asked = stack.logits(hidden).double()
        plain = _scores(form, hidden).double()
    fits = []
    for softcap in {None, cap}:
        # The scale is read off the small rows, where a softcap bends little; the fit is judged on all.
        low, wanted = plain[:_ROWS], asked[:_ROWS]
        if softcap is not None:
            wanted = torch.atanh((wanted / softcap).clamp(-0.999, 0.999)) * softcap
        scale = float((wanted * low).sum() / (low * low).sum())
        ours = scale * plain if softcap is None else softcap * torch.tanh(scale * plain / softcap)
        fits.append((float(torch.linalg.norm(ours - asked) / torch.linalg.norm(asked)), scale, softcap))
    tolerance = 1e-5 if hidden.dtype in (torch.float32, torch.float64) else 2e-2
    error, scale, softcap = min(fits, key=lambda fit: fit[0])
    if not error <= tolerance:
        return None
    return replace(form, scale=_named_scale(stack, scale, tolerance), softcap=softcap)


_ROWS = 4


def _scores(form: HeadForm, hidden: torch.Tensor) -> torch.Tensor:
    if form.packed is None:
        return nn.functional.linear(hidden, form.weight, form.bias)
    scores = hidden.new_empty(hidden.shape[0], form.matrix.shape[0])
    form.matrix.scores_into(scores, hidden)
    return scores if form.bias is None else scores + form.bias.to(scores.dtype)


def _probes(form: HeadForm, dtype: torch.dtype, cap: float | None) -> torch.Tensor:
    """Hidden states whose logits are small, and as many whose logits reach well past the softcap."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, form.matrix.shape[1], generator=generator).to(form.weight.device)
    with torch.no_grad():
        size = float(_scores(replace(form, bias=None), hidden.to(dtype)).float().std())
    reach = cap or size
    return torch.cat([hidden * (0.2 * reach / size), hidden * (2 * reach / size)]).to(dtype)


def _named_scale(stack: Stack, measured: float, tolerance: float) -> float:
    """The exact scale: one, or a number of the model's config (or its inverse) that the measured one is close to."""
    settings = stack.model.config.get_text_config().to_dict().values()
    numbers = [float(v) for v in settings if isinstance(v, (int, float)) and not isinstance(v, bool) and v]
    near = [x for x in (1.0, *numbers, *(1 / n for n in numbers)) if abs(measured / x - 1) <= tolerance]
    return min(near, key=lambda x: abs(measured / x - 1)) if near else measured
