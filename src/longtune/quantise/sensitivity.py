"""How much the output of a model changes when one of its modules alone is quantised.

The figure is KL(p || q), in nats, averaged over positions: p the model's own next-token distribution, q that of the
model with the one module quantised. The input of every layer is kept from one pass of the plain model, so that a module
costs only the layers from its own up; one module is exchanged at a time, and logits exist for a few positions at once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from longtune.engine import Engine
from longtune.errors import Problem, UserError
from longtune.model.packed.formats import Format
from longtune.model.stack import Prologue, Stack, evaluating
from longtune.quantise.units import BEFORE, Unit
from longtune.tree import Tree

_KEPT_BYTES = 1 << 30
"""Up to this size the plain model's log-probs are kept; larger ones are made again for each module."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A row to measure on.

    Attributes:
        tokens: int64 [T].
        positions: of the hidden states whose predictions are compared, int64 [P], P >= 1.
    """

    tokens: torch.Tensor
    positions: torch.Tensor


def samples_of(trees: Sequence[Tree], *, tokens: int, row_tokens: int, seed: int = 0) -> list[Sample]:
    """Rows drawn without repetition until `tokens` are reached; the last one is cut, or all are taken.

    Predictions are compared where the row has a target.

    Args:
        trees: training examples of one node each. tokens: in all. row_tokens: longer rows are cut at their end.

    Raises:
        UserError: no row has a target among its first tokens.
    """
    chosen: list[Sample] = []
    left = tokens
    for index in torch.randperm(len(trees), generator=torch.Generator().manual_seed(seed)).tolist():
        if left < 2:
            break
        tree = trees[index]
        if len(tree.nodes) != 1:
            raise UserError(Problem(tree.row or "data", "is a pair of answers", "measure on rows with one answer"))
        row = tree.nodes[0].tokens[: min(row_tokens, left)]
        positions = tree.targets.hidden.unique()
        positions = positions[positions < row.numel()]
        if positions.numel():
            chosen.append(Sample(row, positions))
            left -= row.numel()
    if not chosen:
        raise UserError(Problem("data", "no row has a trained token among those that are looked at", "raise --tokens"))
    return chosen


def digest_of(samples: Iterable[Sample]) -> str:
    """sha256 (hex) of the rows and positions."""
    digest = hashlib.sha256()
    for sample in samples:
        for values in (sample.tokens, sample.positions):
            digest.update(f"{values.numel()} ".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def measure(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    jobs: Sequence[tuple[Unit, Format]],
    on_figure: Callable[[Unit, Format, float], None] | None = None,
    *,
    head_chunk: int = 128,
) -> list[float]:
    """The mean KL divergence of the output for each unit in its format, everything else being as it is.

    Args:
        model: with plain weights; unchanged afterwards.
        on_figure: called after each job.
        head_chunk: positions whose logits exist at once.

    Raises:
        UserError: the model can't be seen as layers, or its own output is not finite.
    """
    with _probing(model, samples, head_chunk) as prober:
        figures = []
        for unit, format in jobs:
            figures.append(prober.divergence_of(unit, format))
            if on_figure is not None:
                on_figure(unit, format, figures[-1])
        return figures


def divergence(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    change: Callable[[PreTrainedModel], PreTrainedModel],
    *,
    head_chunk: int = 128,
) -> float:
    """The mean KL divergence of a changed model from a model, at the same positions.

    Args:
        change: gives the model to compare; it may be the same one with other weights, which stay.
    """
    with _probing(model, samples, head_chunk) as prober:
        if not prober.keeps:
            raise UserError(Problem("data", "is too much to compare whole models on", "lower --tokens"))
        kept = prober.log_probs
    other = change(model)
    with _probing(other, samples, head_chunk, plain=kept) as prober:
        return prober.divergence(BEFORE)


@contextmanager
def _probing(
    model: PreTrainedModel, samples: Sequence[Sample], head_chunk: int, plain: list[torch.Tensor] | None = None
) -> Iterator[_Prober]:
    with torch.no_grad(), evaluating(model):
        yield _Prober(model, samples, head_chunk, plain)


class _Prober:
    """The plain model's pass over the samples, and passes of the changed model from any layer on."""

    def __init__(
        self, model: PreTrainedModel, samples: Sequence[Sample], head_chunk: int, plain: list[torch.Tensor] | None
    ):
        self.samples = samples
        self.head_chunk = head_chunk
        self.stack = Stack(model)
        self.starts = self._structure(model)
        self.layers = len(self.stack.layers)
        device = self.stack.device
        self.tokens = [sample.tokens.to(device) for sample in samples]
        self.columns = [sample.positions.to(device) for sample in samples]
        self.count = sum(sample.positions.numel() for sample in samples)
        self.prologues: list[Prologue] = []
        self.inputs: list[list[torch.Tensor]] = []
        self.hidden: list[torch.Tensor] = []
        for index in range(len(samples)):
            self._plain_pass(index)
        wide = self.count * int(model.config.get_text_config().vocab_size) * 4
        self.keeps = plain is not None or wide <= _KEPT_BYTES
        self.log_probs = plain or []
        if plain is None and self.keeps:
            self.log_probs = [self._log_probs(hidden) for hidden in self.hidden]

    def _structure(self, model: nn.Module) -> list[int]:
        """For each layer, the lowest one that must be run again when it changes (keys and values are shared)."""
        engine = Engine(model)
        try:
            self.stack.returns_tuple = list(engine.stack.returns_tuple)
            donors = engine.structure.donors
        finally:
            engine.close()
        lowest = [layer if donor is None else min(donor, layer) for layer, donor in enumerate(donors)]
        return [min([layer, *lowest[layer:]]) for layer in range(len(lowest))]

    def _plain_pass(self, index: int) -> None:
        tokens = self.tokens[index]
        prologue = self.stack.prologue(tokens, torch.arange(tokens.numel(), device=tokens.device))
        self.prologues.append(prologue)
        flow = prologue.residual
        inputs = []
        for layer in range(self.layers):
            inputs.append(flow.to("cpu"))
            flow = self.stack.layer(layer, flow, prologue.calls[layer])
        self.inputs.append(inputs)
        hidden = self._epilogue(index, flow)
        if not bool(hidden.isfinite().all()):
            place = type(self.stack.model).__name__
            raise UserError(Problem(place, f"its own output is not finite in {self.stack.dtype}", "use a wider dtype"))
        self.hidden.append(hidden)

    def _epilogue(self, index: int, flow: torch.Tensor) -> torch.Tensor:
        """Hidden states [P, H] at the sample's positions."""
        tokens = self.tokens[index]
        hidden = self.stack.epilogue(tokens, torch.arange(tokens.numel(), device=tokens.device), flow)
        return hidden[0, self.columns[index]]

    def _log_probs(self, hidden_PH: torch.Tensor) -> torch.Tensor:
        """fp32 [P, V], on the CPU."""
        pieces = hidden_PH.split(self.head_chunk)
        return torch.cat([torch.log_softmax(self.stack.logits(piece).float(), -1).to("cpu") for piece in pieces])

    def divergence_of(self, unit: Unit, format: Format) -> float:
        """Mean KL with one unit exchanged."""
        with unit.exchanged(format):
            if self.keeps:
                return self.divergence(unit.layer)
            changed = [self._run(index, unit.layer) for index in range(len(self.samples))]
            if unit.layer not in (BEFORE, self.layers):
                return self._compare(changed, None)
        # The unit may be the head's own matrix: each side is computed with its own.
        return self._compare(changed, (unit, format))

    def divergence(self, layer: int) -> float:
        """Mean KL of the model as it is now from the kept log-probs, everything below `layer` being unchanged."""
        total = 0.0
        for index, plain in enumerate(self.log_probs):
            hidden = self._run(index, layer)
            for piece, own in zip(hidden.split(self.head_chunk), plain.split(self.head_chunk), strict=True):
                total += _kl(own.to(piece.device), torch.log_softmax(self.stack.logits(piece).float(), -1))
        return _mean(total, self.count)

    def _compare(self, changed: list[torch.Tensor], unit: tuple[Unit, Format] | None) -> float:
        """Mean KL where the plain log-probs are too large to keep."""
        total = 0.0
        for before, after in zip(self.hidden, changed, strict=True):
            for own, piece in zip(before.split(self.head_chunk), after.split(self.head_chunk), strict=True):
                plain = torch.log_softmax(self.stack.logits(own).float(), -1)
                if unit is None:
                    logits = self.stack.logits(piece)
                else:
                    with unit[0].exchanged(unit[1]):
                        logits = self.stack.logits(piece)
                total += _kl(plain, torch.log_softmax(logits.float(), -1))
        return _mean(total, self.count)

    def _run(self, index: int, layer: int) -> torch.Tensor:
        """Hidden states [P, H] of the model as it is now."""
        if layer == self.layers:
            return self.hidden[index]
        prologue = self.prologues[index]
        start = 0 if layer == BEFORE else self.starts[layer]
        if layer == BEFORE:
            tokens = self.tokens[index]
            prologue = self.stack.prologue(tokens, torch.arange(tokens.numel(), device=tokens.device))
            flow = prologue.residual
        else:
            flow = self.inputs[index][start].to(self.stack.device)
        for number in range(start, self.layers):
            flow = self.stack.layer(number, flow, prologue.calls[number])
        return self._epilogue(index, flow)


def _kl(plain_PV: torch.Tensor, changed_PV: torch.Tensor) -> float:
    """Sum over positions of KL(plain || changed), from log-probs."""
    # A probability of zero counts nothing, whatever the other side is.
    terms = torch.where(plain_PV.isneginf(), 0.0, plain_PV.exp() * (plain_PV - changed_PV))
    return float(terms.sum(dtype=torch.float64))


def _mean(total: float, count: int) -> float:
    # Rounding may leave a sum of equal distributions a little below zero.
    return total / count if math.isnan(total) or total > 0 else 0.0
