"""What a model's head computes: a matrix and what follows it, learnt by asking the model.

Gemma-style heads bend the logits with a softcap, others scale them. `read_form` proposes a closed form and checks it
against the model's own logits; where none fits, the head is run through the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from longtune.model.stack import Stack


@dataclass(frozen=True, slots=True)
class HeadForm:
    """logits = cap(scale * (h W^T + b)), cap(z) = softcap * tanh(z / softcap) where softcap is given.

    Attributes:
        weight: [V, H]. bias: [V] or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def read_form(stack: Stack) -> HeadForm | None:
    """The closed form of the model's head, or None where there is none (or where the head itself is trained)."""
    head = stack.head_module
    if type(head) is not nn.Linear or not head.weight.is_floating_point():
        return None
    if any(p.requires_grad for p in stack.head_parameters):
        return None
    cap = getattr(stack.model.config.get_text_config(), "final_logit_softcapping", None)
    if head.weight.is_meta:
        return HeadForm(head.weight, head.bias, 1.0, cap)  # No values to try: the config is believed.
    hidden = _probes(head, cap)
    with torch.no_grad():
        asked = stack.logits(hidden).double()
        plain = nn.functional.linear(hidden, head.weight, head.bias).double()
    fits = []
    for softcap in {None, cap}:
        # The scale is read off the small rows, where a softcap bends little; the fit is judged on all.
        low, wanted = plain[:_ROWS], asked[:_ROWS]
        if softcap is not None:
            wanted = torch.atanh((wanted / softcap).clamp(-0.999, 0.999)) * softcap
        scale = float((wanted * low).sum() / (low * low).sum())
        ours = scale * plain if softcap is None else softcap * torch.tanh(scale * plain / softcap)
        fits.append((float(torch.linalg.norm(ours - asked) / torch.linalg.norm(asked)), scale, softcap))
    tolerance = 1e-5 if head.weight.dtype in (torch.float32, torch.float64) else 2e-2
    error, scale, softcap = min(fits, key=lambda fit: fit[0])
    if not error <= tolerance:
        return None
    return HeadForm(head.weight, head.bias, _named_scale(stack, scale, tolerance), softcap)


_ROWS = 4


def _probes(head: nn.Linear, cap: float | None) -> torch.Tensor:
    """Hidden states whose logits are small, and as many whose logits reach well past the softcap."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, head.weight.shape[1], generator=generator).to(head.weight.device)
    with torch.no_grad():
        size = float(nn.functional.linear(hidden, head.weight.float()).std())
    reach = cap or size
    return torch.cat([hidden * (0.2 * reach / size), hidden * (2 * reach / size)]).to(head.weight.dtype)


def _named_scale(stack: Stack, measured: float, tolerance: float) -> float:
    """The exact scale: one, or a number of the model's config (or its inverse) that the measured one is close to."""
    settings = stack.model.config.get_text_config().to_dict().values()
    numbers = [float(v) for v in settings if isinstance(v, (int, float)) and not isinstance(v, bool) and v]
    near = [x for x in (1.0, *numbers, *(1 / n for n in numbers)) if abs(measured / x - 1) <= tolerance]
    return min(near, key=lambda x: abs(measured / x - 1)) if near else measured
