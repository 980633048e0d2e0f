"""The GPU head of a frozen matrix: one pass over slices of the vocabulary, whose logits are forgotten at once.

d(hidden) of a token is its cotangent times (row of its target - softmax-weighted mean of all rows), and such a mean can
be taken online, as FlashAttention takes it over keys (Dao et al. 2022): for each slice the library multiplies hidden
states by the matrix, a kernel (`triton_online.py`) turns the logits into exp(logit - reference), and the library
multiplies those by the same slice of the matrix, onto fp32 sums. What is left is two products in all, a buffer of the
logits of one slice, and the sums; each slice of a packed matrix is dequantised once for both products.

The target's own column is left out of the sums and added at the end, so that a target of which the model is sure loses
nothing to cancellation. A trained matrix needs normalised probabilities while its logits exist: `fused.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from longtune.head.form import HeadForm
from longtune.head.fused import no_autocast
from longtune.head.matrix import add_product, add_products, even_parts, product_into

LOGITS_BYTES = 128 << 20
"""Size of the buffer of logits at most."""

SUMS_BYTES = 64 << 20
"""Size of the fp32 sums of d(hidden) at most: it says how many targets pass over the matrix together."""

COLUMNS = 8192
"""Columns of the vocabulary in a slice at most; a program of the kernel holds so many."""

FINISHED = 1024
"""Targets whose rows of a packed matrix exist at once."""


class OnlineHead:
    """The contract of `heads.Head` for bf16, fp16 and fp32 on CUDA, and a matrix and bias that are not trained.

    Args:
        form: the head's closed form.
        chunk: no more logits at once than so many targets have; None is what `LOGITS_BYTES` hold.
        tokens, columns: targets of a pass and columns of a slice, instead of those that memory allows (benchmarks).
    """

    def __init__(self, form: HeadForm, chunk: int | None, *, tokens: int | None = None, columns: int | None = None):
        if any(p is not None and p.requires_grad for p in (form.weight, form.bias)):
            raise ValueError("the online head is for a matrix and bias that are not trained")
        self.form = form
        self.chunk = chunk
        self.matrix = form.matrix
        self.parameters: list[torch.Tensor] = []
        self._forced = tokens, columns

    def log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        return self._run(hidden_MH, token_M, None)[0]

    def backward(self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor):
        log_probs, dhidden = self._run(hidden_MH, token_M, cotangent_M.float().contiguous())
        assert dhidden is not None
        return log_probs, dhidden.to(hidden_MH.dtype), []

    def sizes(self, count: int) -> tuple[int, int]:
        """Targets of a pass and columns of a slice, for so many targets."""
        V, H = self.matrix.shape
        tokens, columns = self._forced
        room = LOGITS_BYTES // 4 if self.chunk is None else min(LOGITS_BYTES // 4, self.chunk * V)
        if tokens is None:
            tokens = max(128, SUMS_BYTES // (4 * H) // 128 * 128)
            # Slices of a thousand columns at least, or every product would be a thin one.
            tokens = max(1, min(tokens, room // min(1024, V)))
            # Passes of about the same size, of whole tiles of a product.
            passes = max(1, -(-count // tokens))
            even = -(-count // passes)
            tokens = max(1, min(tokens, -(-even // 128) * 128, count))
        if columns is None:
            columns = min(COLUMNS, 1 << max(0, (room // tokens).bit_length() - 1), V)
        return tokens, columns

    @torch.no_grad()
    def _run(
        self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The hidden states as the products want them: the matrix's dtype, which may differ under autocast.
        dtype = self.form.weight.dtype if self.form.packed is None else hidden_MH.dtype
        hidden_MH = hidden_MH.to(dtype).contiguous()
        count, device = token_M.numel(), hidden_MH.device
        log_probs = torch.empty(count, dtype=torch.float32, device=device)
        dhidden = None if cotangent_M is None else torch.empty_like(hidden_MH)
        if not count:
            return log_probs, dhidden
        tokens, columns = self.sizes(count)
        # Rows that the kernel and a product can both read, whatever the slice's size.
        logits = torch.empty(tokens, -(-columns // 64) * 64, dtype=torch.float32, device=device)
        buffer = self.matrix.buffer(columns, dtype)
        with no_autocast(hidden_MH), torch.cuda.device_of(hidden_MH):  # Triton launches on the current device.
            for start in range(0, count, tokens):
                own = slice(start, min(start + tokens, count))
                self._pass(
                    hidden_MH[own], token_M[own], None if cotangent_M is None else cotangent_M[own], log_probs[own],
                    None if dhidden is None else dhidden[own], logits[: own.stop - start], columns, buffer,
                )  # fmt: skip
        return log_probs, dhidden

    def _pass(
        self,
        hidden: torch.Tensor,
        token: torch.Tensor,
        cotangent: torch.Tensor | None,
        log_probs: torch.Tensor,
        dhidden: torch.Tensor | None,
        logits: torch.Tensor,
        columns: int,
        buffer: torch.Tensor | None,
    ) -> None:
        V, H = self.matrix.shape
        M = hidden.shape[0]
        carried = torch.empty(3, M, dtype=torch.float32, device=hidden.device)
        sums = None
        if dhidden is not None:
            parts = even_parts(M, columns, H)
            sums = torch.zeros(parts, M, H, dtype=torch.float32, device=hidden.device)
        for first in range(0, V, columns):
            width = min(columns, V - first)
            rows = self.matrix.rows(slice(first, first + width), buffer)
            product_into(logits[:, :width], hidden, rows.t())
            weights = logits.view(hidden.dtype)[:, :width]
            self._slice(logits, weights, token, carried, sums, first, width, columns)
            if sums is not None:
                _add(sums, weights, rows)
        if dhidden is None or cotangent is None or sums is None:
            self._finish(carried, None, log_probs, None, cotangent, token)
            return
        # A whole matrix is indexed by all targets; of a packed one, a bounded number of their rows exists at once.
        step = M if self.form.packed is None else FINISHED
        for start in range(0, M, step):
            own = slice(start, start + step)
            self._finish(carried[:, own], sums[:, own], log_probs[own], dhidden[own], cotangent[own], token[own])

    def _slice(
        self,
        logits: torch.Tensor,
        weights: torch.Tensor,
        token: torch.Tensor,
        carried: torch.Tensor,
        sums: torch.Tensor | None,
        first: int,
        width: int,
        columns: int,
    ) -> None:
        if logits.is_meta:
            return
        from longtune.head.triton_online import slice_kernel

        form = self.form
        block = max(16, 1 << (columns - 1).bit_length())
        kernel: Any = slice_kernel
        kernel[(token.numel(),)](
            logits,
            weights,
            logits if form.bias is None else form.bias.detach(),
            token,
            *carried,
            logits if sums is None else sums,
            logits.stride(0),
            weights.stride(0),
            0 if sums is None else sums.stride(0),
            first,
            width,
            self.matrix.shape[1],
            form.scale,
            form.softcap or 1.0,
            PARTS=1 if sums is None else sums.shape[0],
            FIRST=first == 0,
            HAS_BIAS=form.bias is not None,
            HAS_SOFTCAP=form.softcap is not None,
            HAS_GRADIENT=sums is not None,
            BLOCK=block,
            BLOCK_H=1024,
            num_warps=min(max(block // 512, 4), 16),
        )

    def _finish(
        self,
        carried: torch.Tensor,
        sums: torch.Tensor | None,
        log_probs: torch.Tensor,
        dhidden: torch.Tensor | None,
        cotangent: torch.Tensor | None,
        token: torch.Tensor,
    ) -> None:
        rows, by_token = log_probs, True
        if dhidden is not None:
            rows, by_token = self.matrix.rows_of(token, dhidden.dtype)
        if log_probs.is_meta:
            return
        from longtune.head.triton_online import finish_kernel

        kernel: Any = finish_kernel
        kernel[(token.numel(),)](
            log_probs if sums is None else sums,
            rows,
            log_probs if cotangent is None else cotangent,
            token,
            *carried,
            log_probs,
            log_probs if dhidden is None else dhidden,
            0 if sums is None else sums.stride(0),
            rows.stride(0),
            self.matrix.shape[1],
            self.form.scale,
            self.form.softcap or 1.0,
            PARTS=1 if sums is None else sums.shape[0],
            BY_TOKEN=by_token,
            HAS_SOFTCAP=self.form.softcap is not None,
            HAS_GRADIENT=dhidden is not None,
            BLOCK_H=1024,
        )


def _add(sums_PMH: torch.Tensor, weights_MC: torch.Tensor, rows_CH: torch.Tensor) -> None:
    """sums += weights rows. Where the targets are few, the columns are divided among the parts: one product for all of
    them would leave most of a GPU idle."""
    parts = sums_PMH.shape[0]
    share, left = divmod(weights_MC.shape[1], parts)
    if parts == 1 or left or share % 8:
        add_product(sums_PMH[0], weights_MC, rows_CH)
    else:
        weights = weights_MC.unflatten(1, (parts, share)).transpose(0, 1)
        add_products(sums_PMH, weights, rows_CH.unflatten(0, (parts, share)))
