"""What the engine must know of a model before it walks it, learnt from one small forward of the model itself.

Which layer's keys and values each layer reads (donors), which mask each layer asks for, what form the layers'
outputs have, and whether chunks may be walked apart at all.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionMaskInterface

from longtune.attention.function import AttentionPort
from longtune.attention.kernels import Reference
from longtune.attention.path import Score
from longtune.errors import Problem, UserError
from longtune.model.lora import joining
from longtune.model.stack import LayerCall, Stack, evaluating

PROBE_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a model.

    Attributes:
        donors: per layer, the layer whose keys and values it reads (itself, or an earlier one for a sharer), or None
            where it never attends.
        hidden: last hidden states [P, H] of the model's own forward on the probe's tokens 0 .. P-1.
    """

    donors: tuple[int | None, ...]
    hidden: torch.Tensor

    def last_reader(self, layer: int) -> int:
        """The last layer that reads the keys and values of `layer`."""
        return max((i for i, donor in enumerate(self.donors) if donor == layer), default=layer)


class MaskRequest:
    """Stands for the mask that a model asks for, while it is probed."""

    def __init__(self, mask_function: Callable[..., Any] | None):
        self.mask_function = mask_function

    def __getitem__(self, index: Any) -> MaskRequest:
        return self

    def to(self, *args: Any, **kwargs: Any) -> MaskRequest:
        return self

    def sees(self, query: int, key: int) -> bool:
        assert self.mask_function is not None
        at = (torch.tensor(x) for x in (0, 0, query, key))
        return bool(self.mask_function(*at))

    def agrees_with(self, window: int | None) -> bool:
        """Whether the mask is the causal one, cut to `window` positions where one is given."""
        if self.mask_function is None:
            return True
        far = 100_003 if window is None else window
        queries = {0, 1, far - 1, far, far + 1, 2 * far + 1, 3 * far}
        for query in queries:
            keys = {0, query // 2, query - 1, query, query + 1, query - far, query - far + 1, query - far - 1}
            for key in keys:
                if key < 0:
                    continue
                expected = key <= query and (window is None or key > query - window)
                if self.sees(query, key) != expected:
                    return False
        return True


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are one (on the meta device too, where every address is zero)."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def learn(stack: Stack, port: AttentionPort) -> Structure:
    """Run the model's own decoder once on a few tokens and read its structure off.

    Raises:
        UserError: a layer asks for something that the engine would not compute exactly.
    """
    current = -1
    keys: list[tuple[int, torch.Tensor]] = []
    donors: list[int | None] = [None] * len(stack.layers)
    calls: list[LayerCall] = []
    sizes: list[dict[str, int]] = []
    problems: list[Problem] = []
    kernel = Reference()

    def attend(module: torch.nn.Module, q: Any, k: Any, v: Any, mask: Any, score: Score) -> torch.Tensor:
        place = f"layer {current} ({type(module).__name__})"
        if donors[current] is not None:
            problems.append(Problem(place, "the layer attends twice", "this architecture is not supported"))
        same = [layer for layer, key in keys if _place(key) == _place(k)]
        donors[current] = same[0] if same else current
        keys.append((current, k))
        if isinstance(mask, MaskRequest) and not mask.agrees_with(score.window):
            problems.append(Problem(place, "its attention mask is neither causal nor a sliding window"))
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None]
        seen = (distance >= 0) & (distance < (score.window or q.shape[2]))
        out, lse = kernel.forward(q, k, v, scale=score.scale, mask=seen.to(q.device), softcap=score.softcap)
        if score.sinks is not None:
            total = torch.logaddexp(lse, score.sinks.to(lse.dtype)[None, :, None])
            out = (out * torch.exp(lse - total)[..., None]).to(out.dtype)
        return out.transpose(1, 2)

    def enter(index: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            nonlocal current
            current = index
            calls.append(LayerCall(args[1:], kwargs))
            sizes.append({k: len(v) for k, v in kwargs.items() if isinstance(v, MutableMapping)})

        return hook

    def leave(index: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            stack.returns_tuple[index] = isinstance(output, tuple)

        return hook

    handles = [layer.register_forward_pre_hook(enter(i), with_kwargs=True) for i, layer in enumerate(stack.layers)]
    handles += [layer.register_forward_hook(leave(i)) for i, layer in enumerate(stack.layers)]
    masks = AttentionMaskInterface._global_mapping
    tokens = torch.arange(PROBE_TOKENS, device=stack.device)
    port.probe = attend
    masks[port.name] = lambda *args, mask_function=None, **kwargs: MaskRequest(mask_function)
    try:
        with torch.no_grad(), evaluating(stack.model), stack.attending(port.name), joining(stack.decoder):
            hidden = stack.run_decoder(tokens, tokens)
    finally:
        port.probe = None
        masks.pop(port.name, None)
        for handle in handles:
            handle.remove()
    if problems:
        raise UserError(problems)
    stack.learn_shared(calls, sizes)
    return Structure(tuple(donors), hidden[0])
