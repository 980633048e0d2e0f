"""Whether compiled layers give the gradients of plain ones: a short row is walked both ways before a run trusts them.

A compiler that loses a gradient does so without a word, and only for some versions, models and operations; what it
makes of a layer does not depend on the row. `engine.py` asks here once for each kind of row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from longtune.engine.layers import Layers
from longtune.engine.walk import Walk
from longtune.model.stack import Compiling
from longtune.tree import Forest, Tree

if TYPE_CHECKING:
    from longtune.engine.engine import Engine

Kind = tuple[Compiling, int | None]
"""How the cells of a row are compiled, and for chunks of which size."""

ANY_SIZE_TOKENS = 512
"""Tokens of the row on which layers that are compiled for any size are tried."""

_SLACK = {torch.float64: 1e-5, torch.float32: 1e-2}
"""Relative difference that rounding may make; products in tf32 are further apart than those in fp32."""
_SLACK_HALF = 0.3
"""Of bf16 and fp16. A lost gradient makes the difference about one."""
_FAINT = 1e-2
"""Norm, of the largest group's, below which a group's gradient may be nothing but rounding."""


def kind_of(engine: Engine, forest: Forest) -> Kind | None:
    """How a row's cells are compiled; None where none of them is."""
    layers = Layers(engine.stack.layers)
    if all(layers[i].random for i in range(len(layers))):
        return None
    size = engine.plan.chunk_tokens
    if size is not None and forest.size >= size:
        return "size", size
    return ("any size", None) if len(forest.chunks(size)) == 1 else None


def disproof(engine: Engine, forest: Forest, kind: Kind) -> str | None:
    """Walk the beginning of a row as long as this one with the layers compiled and plain; the reason not to trust the
    compiled ones, or None.

    Args:
        kind: `kind_of` the row.

    Raises:
        torch._dynamo.exc.TorchDynamoException: the layers can't be compiled.
    """
    how, size = kind
    tokens = min(forest.size, ANY_SIZE_TOKENS if how == "any size" or size is None else 2 * size)
    generator = torch.Generator().manual_seed(0)
    words = int(engine.stack.model.config.get_text_config().vocab_size)
    row = Forest([Tree.sequence(torch.randint(0, words, (tokens,), generator=generator))])
    plain = _gradients(engine, row, False)
    try:
        compiled = _gradients(engine, row, True)
    except (torch._dynamo.exc.TorchDynamoException, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Whatever a compiled layer does wrong: plain ones have just gone through.
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        return f"compiled layers fail where plain ones don't ({type(error).__name__}: {first})"
    groups = _by_group(engine, plain)
    norms = {name: _norm(lambda x: plain[x], members) for name, members in groups.items()}
    largest = max(norms.values(), default=0.0)
    narrow = _SLACK.get(engine.stack.dtype, _SLACK_HALF)
    for name, members in groups.items():
        apart = _norm(lambda x: compiled[x] - plain[x] if x in compiled else plain[x], members)
        reference = max(norms[name], _FAINT * largest)
        # With what isn't finite nothing can be compared.
        if math.isfinite(norms[name]) and not apart <= narrow * reference:
            return f"compiled layers give other gradients (of {name}, relative difference {apart / reference:.2g})"
    return None


def _gradients(engine: Engine, row: Forest, compiled: bool) -> dict[int, torch.Tensor]:
    """Gradients of the row's log-probs in the host's memory, by the parameter's identity."""
    before = engine.compile, engine.on_phase
    engine.compile, engine.on_phase = compiled, None
    try:
        walk = Walk(engine, row, (0, 0), True)
        if walk.recomputes:
            _ = engine.unread
        walk.forward()
        # Sums over the tokens then neither vanish in fp16 nor overflow.
        walk.head(torch.full((len(row.targets),), len(row.targets) ** -0.5, dtype=engine.wide_dtype))
        walk.backward()
    finally:
        engine.compile, engine.on_phase = before
    trained = (p for p in engine.model.parameters() if p.requires_grad)
    found = ((id(p), walk.sums.get(p)) for p in trained)
    return {key: gradient.cpu() for key, gradient in found if gradient is not None}


def _by_group(engine: Engine, gradients: dict[int, torch.Tensor]) -> dict[str, list[int]]:
    """Parameters with a gradient by their names without numbers: those that layers of one kind have in common."""
    groups: dict[str, list[int]] = {}
    for name, parameter in engine.model.named_parameters():
        if id(parameter) in gradients:
            short = ".".join(part for part in name.split(".") if not part.isdigit())
            groups.setdefault(short, []).append(id(parameter))
    return groups


def _norm(tensor: Callable[[int], torch.Tensor], members: list[int]) -> float:
    return sum(float(torch.linalg.vector_norm(tensor(x), dtype=torch.float64)) ** 2 for x in members) ** 0.5
