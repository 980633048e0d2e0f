"""The engine: one model, one plan, any number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from longtune.attention.function import AttentionPort
from longtune.attention.select import path_attention
from longtune.engine.boundary import make_store
from longtune.engine.plan import Plan
from longtune.engine.proof import Kind, disproof, kind_of
from longtune.engine.structure import PROBE_TOKENS, learn
from longtune.engine.unread import Unread
from longtune.engine.walk import Walk
from longtune.errors import Problem, UserError
from longtune.head.heads import make_head
from longtune.model.packed.opened import layer_open
from longtune.model.stack import Stack, evaluating
from longtune.objective.base import Objective, Totals
from longtune.tree import Forest, Tree

OnPhase = Callable[[str, int | None], None]
Result = TypeVar("Result")


class Engine:
    """Runs training and evaluation steps of a model by walking the grid of layers x chunks.

    Args:
        model: a causal LM of transformers, PEFT-wrapped or not. It is not changed; while a walk runs, its attention
            calls go to this engine.
        plan: how to walk.
        seed: seed of the run, for randomness inside layers (dropout).
        attention: name of an attention kernel, to overrule the choice.
        compile: run the layers through `torch.compile`: each chunk size of a plan compiles them anew, rows of one chunk
            once for all sizes. Before the first row of each kind a short one is walked with and without, and the
            gradients are compared (`proof.py`).
        scratch: folder for boundaries on disk (default: the system's temporary folder).
        on_phase: called after each phase of a walk: ("prologue" | "forward" | "head" | "done", None), and
            ("backward", first layer) after each segment's backward.
        on_compile_failure: called with the reason when the layers can't be compiled here, or compiled ones give other
            gradients than plain ones; the engine then goes on as it would without `compile`. None: such a failure is an
            error.

    Attributes:
        attention_choice: the attention kernel and the reason for it.
        unchunkable: why chunks cannot be walked apart (a layer mixes tokens outside attention), or None.

    Raises:
        UserError: the model is no causal LM of transformers, or does something that the walk would not compute exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        seed: int = 0,
        attention: str | None = None,
        compile: bool = False,
        scratch: Path | None = None,
        on_phase: OnPhase | None = None,
        on_compile_failure: Callable[[str], None] | None = None,
    ):
        self.model = model
        self.plan = plan or Plan()
        self.seed = seed
        self.compile = compile
        self.scratch = scratch
        self.on_phase = on_phase
        self.on_compile_failure = on_compile_failure
        self.stack = Stack(model)
        computing, self.attention_choice = path_attention(self.stack.device, self.stack.dtype, attention)
        self.port = AttentionPort(computing)
        self.wide_dtype = torch.promote_types(self.stack.dtype, torch.float32)
        self.unchunkable: str | None = None
        try:
            self.structure = learn(self.stack, self.port)
            with torch.no_grad(), evaluating(self.stack.model):
                # Outside any walk, since a head is looked for by trial.
                self.stack.logits(self.structure.hidden[:1])
            self.head = make_head(self.stack, self.plan.head_chunk)
            self._head_state = self._state_of_head()
            self._unread: tuple[Unread, ...] | None = None
            self._proved: set[Kind] = set()
            self._open_stores()
            self.unchunkable = self._check()
        except BaseException as error:
            self.port.close()
            if isinstance(error, Exception) and not isinstance(error, (UserError, torch.OutOfMemoryError)):
                raise UserError(_cannot_be_walked(self.stack, error)) from error
            raise

    def set_plan(self, plan: Plan) -> None:
        """Walk differently from the next step on."""
        if plan.head_chunk != self.plan.head_chunk:
            self.head = make_head(self.stack, plan.head_chunk)
            self._head_state = self._state_of_head()
        other = plan.boundary_store != self.plan.boundary_store
        self.plan = plan
        if other:
            self._close_stores()
            self._open_stores()

    @property
    def unread(self) -> tuple[Unread, ...]:
        """Per layer, what a cell may leave out whose gradients alone are wanted; learnt when it is first asked for."""
        if self._unread is None:
            self._unread = self._learn_unread()
        return self._unread

    @unread.setter
    def unread(self, known: tuple[Unread, ...]) -> None:
        self._unread = known

    def _learn_unread(self) -> tuple[Unread, ...]:
        forest = Forest([Tree.sequence(torch.arange(PROBE_TOKENS))])
        with evaluating(self.model), self._probing(Plan(layers_per_segment=1)):
            return Walk(self, forest, (0, 0), True).unread()

    @contextmanager
    def _probing(self, plan: Plan) -> Iterator[None]:
        """Another plan for a small walk that nobody is told of, as the layers are."""
        before = self.plan, self.on_phase, self.compile
        self.plan, self.on_phase, self.compile = plan, None, False
        try:
            yield
        finally:
            self.plan, self.on_phase, self.compile = before

    def _open_stores(self) -> None:
        kind, device = self.plan.boundary_store, self.stack.device
        self.boundaries = make_store(kind, device, self.scratch)
        # The flow is written and read once for each layer: that is no work for a disk.
        self.moving = make_store("host", device) if kind == "disk" else self.boundaries

    def _close_stores(self) -> None:
        self.boundaries.close()
        self.moving.close()

    @property
    def closed(self) -> bool:
        return self.port.closed

    def close(self) -> None:
        """Release host memory and the entry in transformers' registry; the engine cannot be used afterwards."""
        self.port.close()
        self._close_stores()

    def layer_open(self, layer: int) -> AbstractContextManager[int]:
        """Entered while the cells of one layer run, one after another: packed weights are dequantised once for all."""
        return layer_open(self.stack.layers[layer])

    def _begin(self, forest: Forest, key: tuple[int, ...], grad: bool) -> Walk:
        if self.closed:
            raise RuntimeError("the engine was closed: make another one")
        self._refuse_unchunkable(forest)
        self._refuse_mixed_lengths(forest)
        if (state := self._state_of_head()) != self._head_state:
            self.head = make_head(self.stack, self.plan.head_chunk)
            self._head_state = state
        walk = Walk(self, forest, key, grad)
        if walk.recomputes:
            _ = self.unread  # Not in the middle of the walk.
        return walk

    def _state_of_head(self) -> list[tuple[int, bool, torch.dtype]]:
        """Changes when somebody trains, freezes, casts or replaces a part of the head."""
        return [(id(p), p.requires_grad, p.dtype) for p in self.stack.head_parameters]

    def _refuse_unchunkable(self, forest: Forest) -> None:
        if self.unchunkable is None:
            return
        whole = self.plan.chunk_tokens is None or forest.size <= self.plan.chunk_tokens
        if forest.is_single_sequence and whole:
            return
        raise UserError(
            Problem(
                type(self.stack.model).__name__,
                f"{self.unchunkable}; such a model runs with one sequence per row in one chunk"
                f" (this row: {len(forest.trees)} example(s), {forest.size} tokens,"
                f" chunk_tokens {self.plan.chunk_tokens})",
                "set batch_size 1, chunk_tokens null, and no prompt sharing",
            )
        )

    def _refuse_mixed_lengths(self, forest: Forest) -> None:
        rope = self.stack.rope
        if rope and len({rope.regime(length) for length in forest.lengths}) > 1:
            raise UserError(
                Problem(
                    type(self.stack.model).__name__,
                    "its rotary embedding depends on the row's length, and this row holds sequences of"
                    f" {min(forest.lengths)} to {max(forest.lengths)} tokens that would get different ones",
                    "set batch_size 1 and prompt_sharing off",
                )
            )

    def accumulate(
        self, forest: Forest, objective: Objective, totals: Totals, key: tuple[int, ...] = (0, 0)
    ) -> dict[str, float]:
        """One micro-batch: forward, loss, backward. Gradients are added to `.grad` of the trainable parameters.

        Args:
            forest: the micro-batch.
            objective: the loss.
            totals: denominators of the whole optimiser step.
            key: (step, micro-batch), so that randomness inside layers differs between them and repeats on recomputing.

        Returns:
            The micro-batch's additive contributions (`loss` among them), for `objective.metrics`.
        """
        return self._compiling(lambda: self._accumulate(forest, objective, totals, key), proved_on=forest)

    def _accumulate(
        self, forest: Forest, objective: Objective, totals: Totals, key: tuple[int, ...]
    ) -> dict[str, float]:
        walk = self._begin(forest, key, grad=True)
        walk.forward()
        cotangent = objective.known_cotangent(forest, totals)
        if cotangent is not None:
            coming = _to_host(walk.head(cotangent))
            walk.backward()
            walk.sums.deliver()
            # Only now: a host that waited for them before the backward would leave the device without work.
            return objective(forest, coming(), totals).sums
        outcome = objective(forest, walk.log_probs().cpu(), totals)
        walk.head(outcome.cotangent)
        walk.backward()
        walk.sums.deliver()
        return outcome.sums

    def evaluate(self, forest: Forest, objective: Objective, totals: Totals) -> dict[str, float]:
        """The same contributions without gradients and without dropout."""
        return objective(forest, self.log_probs(forest).cpu(), totals).sums

    def log_probs(self, forest: Forest) -> torch.Tensor:
        """Log-probs of the forest's targets [M], fp32, forward only, dropout off."""

        def run() -> torch.Tensor:
            walk = self._begin(forest, (0, 0), grad=False)
            walk.forward()
            return walk.log_probs()

        with evaluating(self.model):
            return self._compiling(run)

    def _compiling(self, run: Callable[[], Result], proved_on: Forest | None = None) -> Result:
        """What `run` gives; where the layers can't be compiled here, or compiled ones give other gradients than plain
        ones, without compiling. `run` must leave nothing behind when it fails.

        Args:
            proved_on: the row whose gradients `run` takes.
        """
        if not self.compile:
            return run()
        cause, fix = None, "set compile: false"
        try:
            reason = None if proved_on is None else self._disproof(proved_on)
            if reason is None:
                return run()
        except torch._dynamo.exc.TorchDynamoException as error:
            inner = getattr(error, "inner_exception", error)
            first = (str(inner).strip() or type(inner).__name__).splitlines()[0][:200]
            reason = f"the layers can't be compiled here ({type(inner).__name__}: {first})"
            cause, fix = error, "set compile: false, or install a C compiler"
        if self.on_compile_failure is None:
            raise UserError(Problem("compile", reason, fix)) from cause
        self.compile = False
        self.on_compile_failure(reason)
        return run()

    def _disproof(self, forest: Forest) -> str | None:
        """Why compiled layers aren't to be trusted with a row; each kind of row is tried once."""
        kind = kind_of(self, forest)
        if kind is None or kind in self._proved:
            return None
        reason = disproof(self, forest, kind)
        if reason is None:
            self._proved.add(kind)
        return reason

    def walk(self, forest: Forest, key: tuple[int, ...], grad: bool) -> Walk:
        """A walk to be driven by hand (used by `longtune.stream`)."""
        return self._begin(forest, key, grad)

    def _check(self) -> str | None:
        """Compare the walk with the model's own forward on a few tokens; the reason if chunks cannot be apart."""
        silent = [i for i, donor in enumerate(self.structure.donors) if donor is None]
        mixes = None
        if silent:
            mixes = f"layer {silent[0]} ({type(self.stack.layers[silent[0]]).__name__}) mixes tokens outside attention"
        if self.stack.device.type == "meta":
            return mixes  # No values to compare.
        tokens = torch.arange(PROBE_TOKENS)
        forest = Forest([Tree.sequence(tokens)])
        expected = self.structure.hidden.double()
        if not bool(expected.isfinite().all()):
            raise UserError(
                Problem(
                    type(self.stack.model).__name__,
                    f"its own forward gives values that are not finite, in {self.stack.dtype}",
                    "look for damaged weights or a damaged adapter, or use a wider dtype",
                )
            )
        narrow = self.stack.dtype in (torch.bfloat16, torch.float16)
        tolerance = 0.1 if narrow else 1e-3
        errors = {}
        with evaluating(self.model), torch.no_grad():
            for chunk in (None, 2):
                with self._probing(Plan(chunk_tokens=chunk)):
                    walk = self._begin(forest, (0, 0), grad=False)
                    walk.forward()
                    hidden = walk.hidden().double()
                errors[chunk] = float(torch.linalg.norm(hidden - expected) / torch.linalg.norm(expected))
        if narrow and max(errors.values()) > tolerance:
            # Rounding alone may move the hidden states of a few tokens by more than that.
            tolerance = max(tolerance, min(1.0, 4 * self._rounding(tokens.to(self.stack.device))))
        if not errors[None] <= tolerance:
            raise UserError(
                Problem(
                    type(self.stack.model).__name__,
                    f"walked layer by layer, the model gives other hidden states than its own forward"
                    f" (relative difference {errors[None]:.2g})",
                    "this architecture is not supported",
                )
            )
        if mixes:
            return mixes
        if not errors[2] <= tolerance:
            return f"its layers mix tokens outside attention (relative difference between chunks {errors[2]:.2g})"
        return None

    def _rounding(self, tokens_T: torch.Tensor) -> float:
        """How far the model's own hidden states move, relatively, when its embeddings do by a rounding error."""
        stack, generator = self.stack, torch.Generator().manual_seed(0)
        step = torch.finfo(stack.dtype).eps

        def shake(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
            return output * (1 + step * torch.randn(output.shape, generator=generator).to(output))

        moved = []
        with evaluating(self.model), torch.no_grad():
            still = stack.run_decoder(tokens_T, tokens_T).double()
            handle = cast(nn.Module, stack.model.get_input_embeddings()).register_forward_hook(shake)
            try:
                for _ in range(3):
                    shaken = stack.run_decoder(tokens_T, tokens_T).double()
                    moved.append(float(torch.linalg.norm(shaken - still) / torch.linalg.norm(still)))
            finally:
                handle.remove()
        return max(moved)


def _to_host(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Send a tensor to the host behind the work that makes it; the result waits for that work alone."""
    if x.device.type != "cuda":
        return x.cpu
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    there.copy_(x, non_blocking=True)
    sent = torch.cuda.Event()
    sent.record(torch.cuda.current_stream(x.device))

    def wait() -> torch.Tensor:
        sent.synchronize()
        return there

    return wait


def _cannot_be_walked(stack: Stack, error: Exception) -> Problem:
    """What it means that a model failed on its first few tokens under the engine."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    reason = f"its forward fails where the engine takes over ({type(error).__name__}: {first[:120]})"
    return Problem(type(stack.model).__name__, reason, "this architecture is not supported")
