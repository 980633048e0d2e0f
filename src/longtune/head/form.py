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
    if any(p.requires_grad for p in head.parameters()):
        return None
    width = head.weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, width, generator=generator).to(head.weight)
    with torch.no_grad():
        asked = stack.logits(hidden).double()
        plain = nn.functional.linear(hidden, head.weight, head.bias).double()
    tolerance = 1e-5 if head.weight.dtype in (torch.float32, torch.float64) else 2e-2
    config = stack.model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    for softcap in (None, cap):
        raw = asked if softcap is None else torch.atanh((asked / softcap).clamp(-0.999999, 0.999999)) * softcap
        scale = float((raw * plain).sum() / (plain * plain).sum())
        scale = 1.0 if abs(scale - 1) < tolerance else scale
        ours = scale * plain if softcap is None else softcap * torch.tanh(scale * plain / softcap)
        if torch.linalg.norm(ours - asked) <= tolerance * torch.linalg.norm(asked):
            return HeadForm(head.weight, head.bias, scale, softcap)
    return None
