"""What an artefact must compute: the logits of the base model with the adapter's updates, on one prompt.

The truth is made by hooks that add each module's update to its output. It so depends on no adapter library, on no file
that was written, and on no merge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from longtune.export.combine import Named
from longtune.model.adapter_files import Update
from longtune.model.experts import is_transposed

PROMPT = "The three laws of thermodynamics, said in one sentence each, are: 1."
"""What both sides read, where the user names nothing else."""

LOSSLESS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Tolerance by the dtype in which both sides compute, where the artefact holds the same numbers."""

ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Tolerance by the dtype to which weights are rounded (SmolLM2-135M differs by 5e-3 in bfloat16, 1e-3 in float16)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an artefact is from base + adapter.

    Attributes:
        largest: largest difference of a logit.
        effect: largest difference that the adapter itself makes.
        scale: largest logit, as a magnitude.
        tolerance: share of `scale` that `largest` may be.
    """

    largest: float
    effect: float
    scale: float
    tolerance: float

    @property
    def allowed(self) -> float:
        """The largest difference that passes."""
        return self.tolerance * self.scale

    @property
    def passes(self) -> bool:
        return self.largest <= self.allowed  # False for NaN.


def compare(base: torch.Tensor, truth: torch.Tensor, found: torch.Tensor, tolerance: float) -> Difference:
    """Differences of logits [tokens, vocabulary]: without adapter, with it, and of the artefact."""
    if found.shape != truth.shape:
        return Difference(float("inf"), float("nan"), float(truth.abs().max()), tolerance)
    largest = (found.double() - truth.double()).abs().max()
    effect = (base.double() - truth.double()).abs().max()
    return Difference(float(largest), float(effect), float(truth.abs().max()), tolerance)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, limit: int = 256) -> torch.Tensor:
    """Token ids [1, tokens] of a prompt, at least one and at most `limit`."""
    ids: Any = tokenizer(prompt)["input_ids"][:limit]
    if not ids:
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        ids = [next((number for number in special if number is not None), 0)]
    return torch.tensor([ids])


@torch.no_grad()
def logits(model: nn.Module, tokens: torch.Tensor, updates: Named | None = None) -> torch.Tensor:
    """Logits [tokens, vocabulary] in fp32 on the CPU, with updates added where they are given."""
    device = next(model.parameters()).device
    with added(model, updates or {}):
        return model(input_ids=tokens.to(device), use_cache=False).logits[0].float().cpu()


@contextlib.contextmanager
def added(model: nn.Module, updates: Named) -> Iterator[None]:
    """For a while every named module's output is increased by its update."""
    handles = []
    try:
        for name, update in updates.items():
            if update.stacked:
                handles += _added_to_stack(model, name, update)
                continue

            def hook(module: nn.Module, args: Any, output: torch.Tensor, update: Any = update) -> torch.Tensor:
                x = args[0]
                low = F.linear(x, update.down_RI.to(x.device, x.dtype))
                return output + update.scale * F.linear(low, update.up_OR.to(x.device, x.dtype))

            handles.append(model.get_submodule(name).register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _added_to_stack(model: nn.Module, name: str, update: Update) -> list[Any]:
    """Hooks that give a module of experts its stack W + s B A while it runs, in place of W."""
    path, _, leaf = name.rpartition(".")

    def before(module: nn.Module, args: Any) -> None:
        weight = getattr(module, leaf)
        delta = update.delta().to(weight.device)
        # The module's own attribute is found before its parameter; updates of several adapters add up.
        vars(module)[leaf] = (weight.float() + (delta.mT if is_transposed(module) else delta)).to(weight.dtype)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(leaf, None)

    experts = model.get_submodule(path)
    return [experts.register_forward_pre_hook(before), experts.register_forward_hook(after)]


@contextlib.contextmanager
def added_all(model: nn.Module, adapters: Sequence[Named]) -> Iterator[None]:
    """`added` for several adapters at once, each on its own."""
    with contextlib.ExitStack() as stack:
        for updates in adapters:
            stack.enter_context(added(model, updates))
        yield
