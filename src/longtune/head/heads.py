"""Hidden states and targets -> token log-probs, and cotangents -> d(hidden), without [T, V].

Three ways with one contract: `Reference` (full logits, for tests), `Chunked` (frozen matrix, analytic backward, a
bounded number of targets at once) and `ModelHead` (any head at all, trained or quantised, through the model's own
forward and autograd, a bounded number of targets at once). On CUDA `online.OnlineHead` takes the place of `Chunked`,
and `fused.FusedChunked` that of `ModelHead` for a trained matrix; `make_head` chooses.
"""

from __future__ import annotations

from typing import Protocol

import torch

from longtune.head.form import HeadForm, read_form
from longtune.head.select import choose
from longtune.model.stack import Stack


class Head(Protocol):
    """Shapes: M targets, hidden [M, H], token int64 [M]; log-probs and cotangents fp32 (fp64 for an fp64 model) [M]."""

    parameters: list[torch.Tensor]
    """Trainable parameters of the head."""

    def log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        """log p(token | hidden), without graph."""
        ...

    def backward(
        self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        """Log-probs [M], d(hidden) [M, H] in the hidden states' dtype, and the gradients of `parameters` (None for one
        that takes no part)."""
        ...


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _pieces(count: int, size: int | None) -> list[slice]:
    """`count` targets in pieces of at most `size` (None: one piece)."""
    step = size or max(count, 1)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class Reference:
    """All logits at once, by the formula."""

    def __init__(self, form: HeadForm):
        self.form = form
        self.parameters: list[torch.Tensor] = []

    def _log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        form = self.form
        logits = torch.nn.functional.linear(hidden_MH, form.weight, form.bias).to(_wide(hidden_MH.dtype)) * form.scale
        if form.softcap is not None:
            logits = form.softcap * torch.tanh(logits / form.softcap)
        return torch.log_softmax(logits, -1).gather(1, token_M[:, None])[:, 0]

    def log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._log_probs(hidden_MH, token_M)

    def backward(self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor):
        with torch.enable_grad():
            hidden = hidden_MH.detach().requires_grad_()
            log_probs = self._log_probs(hidden, token_M)
            (dhidden,) = torch.autograd.grad(log_probs, hidden, cotangent_M.to(log_probs))
        return log_probs.detach(), dhidden, []


class Chunked:
    """A frozen matrix, `chunk` targets at a time; one pass gives log-probs and d(hidden). A packed matrix is
    dequantised a slice of the vocabulary at a time.

    With p = softmax(z), d(lp)/dz = onehot - p; a softcap multiplies by 1 - tanh^2, the scale by itself.
    """

    def __init__(self, form: HeadForm, chunk: int | None):
        self.form = form
        self.chunk = chunk
        self.parameters: list[torch.Tensor] = []

    def _logits(self, hidden_MH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits in fp32 (fp64), and tanh of the capped score where there is a softcap."""
        form = self.form
        if form.packed is None:
            scores = torch.nn.functional.linear(hidden_MH, form.weight, form.bias)
        else:
            scores = hidden_MH.new_empty(hidden_MH.shape[0], form.matrix.shape[0])
            form.matrix.scores_into(scores, hidden_MH)
            if form.bias is not None:
                scores += form.bias.to(scores.dtype)
        logits = scores.to(_wide(hidden_MH.dtype))
        if form.scale != 1.0:
            logits *= form.scale
        if form.softcap is None:
            return logits, None
        bent = logits.div_(form.softcap).tanh_()
        return bent * form.softcap, bent

    def log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        out = hidden_MH.new_empty(token_M.numel(), dtype=_wide(hidden_MH.dtype))
        with torch.no_grad():
            for piece in _pieces(token_M.numel(), self.chunk):
                logits, _ = self._logits(hidden_MH[piece])
                picked = logits.gather(1, token_M[piece, None])[:, 0]
                out[piece] = picked - torch.logsumexp(logits, -1)
        return out

    def backward(self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor):
        out = hidden_MH.new_empty(token_M.numel(), dtype=_wide(hidden_MH.dtype))
        dhidden = torch.empty_like(hidden_MH)
        with torch.no_grad():
            for piece in _pieces(token_M.numel(), self.chunk):
                logits, bent = self._logits(hidden_MH[piece])
                total = torch.logsumexp(logits, -1, keepdim=True)
                column = token_M[piece, None]
                out[piece] = (logits.gather(1, column) - total)[:, 0]
                gradient = logits.sub_(total).exp_()
                gradient.scatter_add_(1, column, torch.full_like(total, -1))
                gradient *= -self.form.scale * cotangent_M[piece, None].to(gradient.dtype)
                if bent is not None:
                    gradient *= 1 - bent * bent
                dhidden[piece] = self.form.matrix.hidden_gradient(gradient.to(hidden_MH.dtype))
        return out, dhidden, []


class ModelHead:
    """Any head, asked through the model, `chunk` targets at a time with autograd inside."""

    def __init__(self, stack: Stack, chunk: int | None):
        self.stack = stack
        self.chunk = chunk
        self.parameters: list[torch.Tensor] = [p for p in stack.head_parameters if p.requires_grad]

    def _log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        logits = self.stack.logits(hidden_MH).to(_wide(hidden_MH.dtype))
        return torch.log_softmax(logits, -1).gather(1, token_M[:, None])[:, 0]

    def log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            pieces = _pieces(token_M.numel(), self.chunk)
            return torch.cat([self._log_probs(hidden_MH[piece], token_M[piece]) for piece in pieces])

    def backward(self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor):
        out = hidden_MH.new_empty(token_M.numel(), dtype=_wide(hidden_MH.dtype))
        dhidden = torch.empty_like(hidden_MH)
        sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        for piece in _pieces(token_M.numel(), self.chunk):
            with torch.enable_grad():
                hidden = hidden_MH[piece].detach().requires_grad_()
                log_probs = self._log_probs(hidden, token_M[piece])
                grads = torch.autograd.grad(
                    log_probs, [hidden, *self.parameters], cotangent_M[piece].to(log_probs), allow_unused=True
                )
            out[piece] = log_probs.detach()
            dhidden[piece] = grads[0]
            for index, grad in enumerate(grads[1:]):
                if grad is not None:
                    total = sums[index]
                    sums[index] = grad.to(_wide(grad.dtype)) if total is None else total.add_(grad)
        return out, dhidden, sums


def gpu_head(form: HeadForm, chunk: int | None) -> Head:
    """The head of a closed form on CUDA: online, or fused where the matrix or bias is trained."""
    from longtune.head.fused import FusedChunked
    from longtune.head.online import OnlineHead

    trained = any(p is not None and p.requires_grad for p in (form.weight, form.bias))
    return FusedChunked(form, chunk) if trained else OnlineHead(form, chunk)


def make_head(stack: Stack, chunk: int | None, name: str | None = None) -> Head:
    """The bounded head for a model.

    Args:
        chunk: targets whose logits exist at once at most (or as many logits).
        name: "online", "fused" or "chunked", to overrule the choice (`select.choose`). The first two are for CUDA with
            triton.

    Returns:
        the head of that name where the model's head has a closed form that it takes, else `ModelHead`; "online" with a
        trained matrix is "fused".
    """
    name = name or choose(stack.device, stack.dtype).name
    form = read_form(stack, trained=name != "chunked", packed=True)
    if form is None:
        return ModelHead(stack, chunk)
    if name == "fused":
        from longtune.head.fused import FusedChunked

        return FusedChunked(form, chunk)
    return gpu_head(form, chunk) if name == "online" else Chunked(form, chunk)
