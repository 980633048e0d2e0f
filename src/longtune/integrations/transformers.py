"""`longtune.stream`: an existing transformers model runs its layers through the engine, behind `loss.backward()`.

Two places of the model are given another forward until the handle is closed. The decoder's returns its hidden states
from one autograd function around the walk, so whatever is put on top of it (logits, a trainer's own head) works as
before. The causal LM's own forward, when it is given labels and not asked for logits, takes the loss from the bounded
head.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from longtune.engine import Engine, Plan, devices
from longtune.engine.budget import budget_here, memory_bytes
from longtune.engine.planner import Planner
from longtune.engine.walk import Walk
from longtune.errors import DoesNotFit, Problem, UserError
from longtune.model.stack import HiddenOutput, find_layers, unwrap
from longtune.tree import Forest, Node, Targets, Tree

IGNORED = -100

_HARMLESS = {
    "use_cache",
    "return_dict",
    "cache_position",
    "num_items_in_batch",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
"""Arguments that do not change what is computed here: positions say which tokens belong together."""


class _Hidden(torch.autograd.Function):
    """Hidden states [T, H] of a forest; the parameters are inputs, so gradients arrive by the ordinary way."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, *parameters: torch.Tensor) -> torch.Tensor:
        walk.forward()
        ctx.walk, ctx.parameters = walk, parameters
        # Not for their values: autograd then refuses a backward after they were changed in place.
        ctx.save_for_backward(*parameters)
        return walk.hidden()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dhidden: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        walk = _take(ctx)
        walk.from_hidden(dhidden)
        return _finish(walk, ctx.parameters)


class _Loss(torch.autograd.Function):
    """sum(cotangent * log-prob) of a forest's targets through the bounded head."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, cotangent: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        walk.forward()
        log_probs = walk.head(cotangent)
        ctx.walk, ctx.parameters = walk, parameters
        ctx.save_for_backward(*parameters)
        return (log_probs * cotangent.to(log_probs)).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        walk = _take(ctx)
        walk.scale(dloss)
        return (None, *_finish(walk, ctx.parameters))


def _take(ctx: Any) -> Walk:
    walk = ctx.walk
    if walk is None:
        raise RuntimeError("a streamed forward can be walked back once; run the forward again")
    _ = ctx.saved_tensors  # Raises if they were changed in place.
    if walk.engine.closed:
        raise RuntimeError("the handle of a streamed model was closed before the backward of its forward")
    walk.check_modes()
    ctx.walk = None
    return walk


def _finish(walk: Walk, parameters: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    walk.backward()
    sums = (walk.sums.get(parameter) for parameter in parameters)
    return (None, *(None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)))


class Streamed:
    """A model under `stream`.

    Attributes:
        plan: how its steps are walked; may be replaced between steps.
    """

    def __init__(self, model: nn.Module, plan: Plan, budgeted: _Budgeted | None = None):
        self._budgeted = budgeted
        self._model = unwrap(model)
        self._decoder = find_layers(self._model)[0]
        handle = getattr(self._decoder.forward, "__longtune__", None)
        if handle is not None and handle._decoder is self._decoder:
            raise UserError(Problem(type(model).__name__, "the model is streamed already", "close the first handle"))
        self.engine = Engine(model, plan)
        self._open = True
        self._decoder_forward = self._decoder.forward
        self._model_forward = self._model.forward
        self._decoder.forward = self._wrap(self._decoder, self._decoder_call)
        self._model.forward = self._wrap(self._model, self._model_call)

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.engine.set_plan(plan)

    def close(self) -> None:
        """Give the model its own forward back."""
        if not self._open:
            return
        self._open = False
        for module, original in ((self._decoder, self._decoder_forward), (self._model, self._model_forward)):
            # Somebody may have wrapped our forward since; then it stays, and passes everything on.
            if getattr(module.forward, "__longtune__", None) is self:
                if getattr(original, "__func__", None) is type(module).forward:
                    del module.forward
                else:
                    module.forward = original
        self.engine.close()

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _replan(self, forest: Forest, grad: bool) -> None:
        if grad and self._budgeted is not None and (plan := self._budgeted.plan_for(self.engine, forest)) is not None:
            self.engine.set_plan(plan)

    def _wrap(self, streamed: nn.Module, call: Any) -> Any:
        """A bound method, so that a deep copy of the module gets one that is bound to the copy and is told apart."""
        original: Any = streamed.forward
        signature = inspect.signature(original)
        names = list(signature.parameters)

        @functools.wraps(original)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not streamed:
                return type(module).forward(module, *args, **kwargs)
            if not self._open:
                return original(*args, **kwargs)
            return call({**dict(zip(names, args, strict=False)), **kwargs})

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [own, *signature.parameters.values()]
        forward.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
        forward.__longtune__ = self  # pyright: ignore[reportFunctionMemberAccess]
        return types.MethodType(forward, streamed)

    # the two forwards

    def _decoder_call(self, given: dict[str, Any]) -> Any:
        if self._passes(given):
            return self._decoder_forward(**given)
        batch = _Batch(given, None)
        grad = self._grad(self._decoder)
        self._replan(batch.forest, grad)
        walk = self.engine.walk(batch.forest, self._key(), grad)
        if grad:
            hidden_TH = _Hidden.apply(walk, *self._parameters(self._decoder))
        else:
            walk.forward()
            hidden_TH = walk.hidden()
        return HiddenOutput(batch.spread(hidden_TH))

    def _model_call(self, given: dict[str, Any]) -> Any:
        output = self._model_output(given)
        if given.get("return_dict") is False and not isinstance(output, tuple):
            return output.to_tuple()
        return output

    def _model_output(self, given: dict[str, Any]) -> Any:
        labels, shifted = given.get("labels"), given.get("shift_labels")
        wants_logits = not (isinstance(keep := given.get("logits_to_keep", 0), int) and keep == 0)
        custom = getattr(self._model, "loss_type", None) not in (None, "ForCausalLM")
        if (labels is None and shifted is None) or wants_logits or custom or self._passes(given):
            return self._model_forward(**given)
        if self._has_another_head(given):
            return self._model_forward(**given)
        rest = {k: v for k, v in given.items() if k not in ("labels", "shift_labels", "logits_to_keep")}
        batch = _Batch(rest, shifted if shifted is not None else _shift(cast(torch.Tensor, labels)))
        count = given.get("num_items_in_batch")
        if count is None:
            count = len(batch.forest.targets)
        if len(batch.forest.targets) == 0 and not torch.is_tensor(count):
            # transformers' own mean over nothing is nan; the graph is kept whole.
            zero = sum((p.sum() * 0 for p in self._parameters(self._model)), torch.zeros((), device=batch.device))
            return CausalLMOutputWithPast(loss=zero * float("nan"))
        cotangent = torch.full((len(batch.forest.targets),), -1.0, dtype=self.engine.wide_dtype, device=batch.device)
        cotangent /= count.to(batch.device) if torch.is_tensor(count) else count
        grad = self._grad(self._model)
        self._replan(batch.forest, grad)
        walk = self.engine.walk(batch.forest, self._key(), grad)
        if grad:
            loss = _Loss.apply(walk, cotangent, *self._parameters(self._model))
        else:
            walk.forward()
            loss = (walk.log_probs() * cotangent).sum()
        return CausalLMOutputWithPast(loss=loss)

    def _has_another_head(self, given: dict[str, Any]) -> bool:
        """Whether a trainer has put its own forward on the model and asks for it by an argument of its own."""
        own = type(self._model).forward
        if getattr(self._model_forward, "__func__", None) is own:
            return False
        known = inspect.signature(own).parameters.keys() | _HARMLESS | {"shift_labels"}
        return any(value is True for name, value in given.items() if name not in known)

    @staticmethod
    def _passes(given: dict[str, Any]) -> bool:
        """Whether a call is generation (a cache, or no graph and inputs that the walk does not take)."""
        cache = given.get("cache", given.get("past_key_values"))
        if cache is not None or (given.get("use_cache") and not torch.is_grad_enabled()):
            return True
        return given.get("input_ids") is None and not torch.is_grad_enabled()

    def _key(self) -> tuple[int, ...]:
        """From torch's generator, so that `torch.manual_seed` and a trainer's saved state decide dropout as usual."""
        if not (self._model.training and torch.is_grad_enabled()):
            return (0,)
        return (int(torch.randint(2**62, ())),)

    @staticmethod
    def _parameters(module: nn.Module) -> list[torch.Tensor]:
        return [p for p in module.parameters() if p.requires_grad]

    def _grad(self, module: nn.Module) -> bool:
        return torch.is_grad_enabled() and bool(self._parameters(module))


class _Budgeted:
    """Plans by a budget, as batches come."""

    def __init__(self, memory: str | int):
        self._bytes = memory_bytes(memory) if isinstance(memory, str) else memory
        self._tokens = 0

    def plan_for(self, engine: Engine, forest: Forest) -> Plan | None:
        """The plan for a batch that is longer than all before; None for others."""
        if forest.size <= self._tokens:
            return None
        stack = engine.stack
        device = devices.measured(stack.device, stack.dtype, stack.model.config)
        budget = budget_here(stack.device, self._bytes)
        with Planner(engine.model, device, like=engine) as planner:
            chosen = planner.choose(forest, budget)
            if chosen is None:
                least = planner.smallest(forest, budget)
                reason = f"a batch of {forest.size:,} tokens needs {least.needed_bytes:,} bytes of {budget.device:,}"
                raise DoesNotFit(Problem("stream: memory", reason, "make batches shorter, or allow more"))
        self._tokens = forest.size
        return chosen.plan


def _shift(labels_BS: torch.Tensor) -> torch.Tensor:
    """Labels of the next token at each position; the last has none."""
    return nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)


class _Batch:
    """A padded batch as a forest, and the way back.

    Args:
        given: the arguments of the call.
        next_labels: the token that each position should predict, int64 [B, S], -100 where none; or None.
    """

    def __init__(self, given: dict[str, Any], next_labels: torch.Tensor | None):
        input_ids = given.get("input_ids")
        problems = [
            Problem(f"stream: {name}", "is not supported in a streamed forward")
            for name, value in given.items()
            if name not in _HARMLESS | {"input_ids", "attention_mask", "position_ids"}
            and (torch.is_tensor(value) or value is True or (value and not isinstance(value, (int, float, str))))
        ]
        if input_ids is None:
            problems.append(Problem("stream: input_ids", "is missing (inputs_embeds cannot be streamed)"))
        if problems:
            raise UserError(problems)
        assert input_ids is not None
        self.device = input_ids.device
        self.rows, self.columns = input_ids.shape
        tokens = input_ids.cpu()
        mask = given.get("attention_mask")
        if mask is not None and mask.ndim != 2:
            raise UserError(
                Problem("stream: attention_mask", f"has {mask.ndim} axes; only [batch, tokens] is supported")
            )
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.cpu().bool()
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(self.columns)[None]
        positions = positions.cpu().expand(self.rows, self.columns)
        wanted = None if next_labels is None else next_labels.cpu()
        trees: list[Tree] = []
        places: list[torch.Tensor] = []
        for row in range(self.rows):
            kept = mask[row].nonzero().flatten()
            if kept.numel() == 0:
                continue
            if int(kept[-1] - kept[0]) + 1 != kept.numel():
                raise UserError(Problem(f"stream: attention_mask, row {row}", "has a hole between its tokens"))
            jumps = (positions[row, kept].diff() != 1).nonzero().flatten() + 1
            for run in torch.tensor_split(kept, jumps.tolist()):
                first = int(positions[row, run[0]])
                labels = torch.full((run.numel(),), IGNORED) if wanted is None else wanted[row, run]
                hidden = (labels != IGNORED).nonzero().flatten()
                targets = Targets.of(hidden, labels[hidden])
                trees.append(Tree((Node(tokens[row, run]),), targets, first_position=first))
                places.append(run + row * self.columns)
        if not trees:
            raise UserError(Problem("stream: attention_mask", "masks every token of the batch"))
        self.forest = Forest(trees)
        self._places = torch.cat(places)

    def spread(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [B, S, H], zero where there is padding."""
        if self._places.numel() != self.rows * self.columns:
            empty = hidden_TH.new_zeros(self.rows * self.columns, hidden_TH.shape[1])
            hidden_TH = empty.index_copy(0, self._places.to(hidden_TH.device), hidden_TH)
        return hidden_TH.view(self.rows, self.columns, -1)


def stream(model: nn.Module, plan: Plan | None = None, memory: str | int | None = None) -> Streamed:
    """Make a transformers model walk its layers through the engine, in place.

    Args:
        model: a causal LM of transformers, PEFT-wrapped or not.
        plan: how to walk; None is one layer per segment and chunks of 8,192 tokens.
        memory: a budget instead of a plan: bytes, a size ("24GB"), or "auto" for what is free. The first batch, and
            each one that is longer than all before, gets the fastest plan that fits. Logits that are asked for are made
            outside the engine, and not counted.

    Returns:
        A handle with `.plan` and `.close()`; it is also a context manager.

    `model(input_ids=..., labels=...).loss.backward()` then never makes [tokens, vocabulary]; `logits` are None unless
    `logits_to_keep` is given, or no labels. Generation with a cache is the model's own. Padding is left out of the
    walk: hidden states there are zero, and a label that only a padding token would predict is not counted.

    Raises:
        UserError: the model cannot be walked, or is streamed already.
        DoesNotFit: (of a batch's forward) no plan fits the budget.
    """
    if memory is None:
        return Streamed(model, plan or Plan(chunk_tokens=8192))
    if plan is not None:
        raise UserError(Problem("stream: memory", "a plan and a budget are both given", "leave one of them out"))
    return Streamed(model, Plan(chunk_tokens=8192), _Budgeted(memory))
