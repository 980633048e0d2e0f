"""The GPU head: library matrix products by token chunk, and one fused Triton pass over the logits between them.

Scores of a few hundred tokens are made into one reused buffer; a kernel turns each row into its log-prob and, in place,
into its gradient, in fp32; the gradient times the matrix is d(hidden). Nothing else of size [tokens, V] exists, and
the logits cross device memory once each way beside the products themselves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from longtune.head.form import HeadForm
from longtune.head.matrix import add_product

LOGITS_BYTES = 256 << 20
"""Size of the buffer of logits."""


def _kernel(hidden: torch.Tensor) -> Any:
    """The pass over the logits; where there are no values (the meta device), what it returns and nothing else."""
    if hidden.is_meta:
        return _without_values
    from longtune.head.triton_logits import log_probs_and_gradient

    return log_probs_and_gradient


def _without_values(
    scores: torch.Tensor, token: Any, cotangent: Any, log_probs: Any, dtype: torch.dtype, **options: Any
) -> torch.Tensor | None:
    return None if cotangent is None else scores.view(dtype)[:, : scores.shape[1]]


def no_autocast(hidden: torch.Tensor) -> AbstractContextManager[Any]:
    """Products in the dtype of their operands."""
    return nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False)


class FusedChunked:
    """The contract of `heads.Head` for bf16, fp16 and fp32 on CUDA; a trained matrix gets its gradient too.

    Args:
        form: the head's closed form. Its weight and bias are trained where they require a gradient.
        chunk: targets at once at most; fewer where the buffer of logits would be larger than `LOGITS_BYTES`.
        wide: keep the logits of a half-precision model in fp32. Rounded to bf16, as the model itself does, they cost
            a sixth less time and up to some hundredths in each log-prob.
    """

    def __init__(self, form: HeadForm, chunk: int | None, *, wide: bool = True):
        self.form = form
        self.chunk = chunk
        self.matrix = form.matrix
        self.wide = wide
        self._trained = [p if p is not None and p.requires_grad else None for p in (form.weight, form.bias)]
        self.parameters: list[torch.Tensor] = [p for p in self._trained if p is not None]

    def _rows(self, dtype: torch.dtype) -> int:
        rows = LOGITS_BYTES // (self.matrix.shape[0] * dtype.itemsize)
        # Whole tiles of the matrix product.
        rows = max(rows // 128 * 128, min(rows, 128), 1)
        return rows if self.chunk is None else min(rows, self.chunk)

    def _pass(
        self,
        hidden_MH: torch.Tensor,
        token_M: torch.Tensor,
        cotangent_M: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
        log_probs_and_gradient = _kernel(hidden_MH)
        count, dtype = token_M.numel(), hidden_MH.dtype
        scores_dtype = torch.float32 if self.wide else dtype
        rows = min(self._rows(scores_dtype), max(count, 1))
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden_MH.device)
        dhidden = None if cotangent_M is None else torch.empty_like(hidden_MH)
        sums: list[torch.Tensor | None] = [
            None if p is None or cotangent_M is None else torch.zeros_like(p, dtype=torch.float32)
            for p in self._trained
        ]
        # Dense rows that a kernel and a matrix product can both read, whatever the vocabulary's size.
        width = -(-self.matrix.shape[0] // 64) * 64
        buffer = torch.empty(rows, width, dtype=scores_dtype, device=hidden_MH.device)
        bias = None if self.form.bias is None else self.form.bias.detach()
        for start in range(0, count, rows):
            own = slice(start, min(start + rows, count))
            hidden = hidden_MH[own]
            scores = buffer[: hidden.shape[0], : self.matrix.shape[0]]
            self.matrix.scores_into(scores, hidden)
            gradient = log_probs_and_gradient(
                scores,
                token_M[own],
                None if cotangent_M is None else cotangent_M[own],
                log_probs[own],
                dtype,
                bias_V=bias,
                scale=self.form.scale,
                softcap=self.form.softcap,
            )
            if gradient is None or dhidden is None:
                continue
            dhidden[own] = self.matrix.hidden_gradient(gradient)
            if (dweight := sums[0]) is not None:
                add_product(dweight, gradient.t(), hidden)
            if (dbias := sums[1]) is not None:
                dbias += gradient.sum(0, dtype=torch.float32)
        return log_probs, dhidden, [s for s, p in zip(sums, self._trained, strict=True) if p is not None]

    def _computed(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """The hidden states as the products want them: the matrix's dtype, which may differ under autocast."""
        dtype = self.form.weight.dtype if self.form.packed is None else hidden_MH.dtype
        return hidden_MH.to(dtype).contiguous()

    def log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), no_autocast(hidden_MH):
            return self._pass(self._computed(hidden_MH), token_M, None)[0]

    def backward(self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor):
        with torch.no_grad(), no_autocast(hidden_MH):
            found = self._pass(self._computed(hidden_MH), token_M, cotangent_M.float().contiguous())
        log_probs, dhidden, grads = found
        assert dhidden is not None
        return log_probs, dhidden.to(hidden_MH.dtype), grads
