"""The GPU head of least memory: logits made in a kernel, tile by tile, with an online log-sum-exp.

The forward keeps one number for each token and block of the vocabulary. The backward makes the logits a second time and
keeps the gradient of one slice of the vocabulary, whose product with the matrix is added up in fp32. That costs a third
product of full size, and never holds a row of logits; `fused.py` is faster where its buffer fits.
"""

from __future__ import annotations

from typing import Any

import torch

from longtune.head.form import HeadForm
from longtune.head.matrix import add_product

TOKENS = 4096
"""Targets at once at most: what the fp32 sums of d(hidden) are kept for."""

SLICE = 4096
"""Columns of the vocabulary whose gradient is kept at once."""


class OnlineHead:
    """The contract of `heads.Head` for bf16, fp16 and fp32 on CUDA, and a matrix that is not trained.

    Args:
        form: the head's closed form; a packed matrix is read as it is where it is affine, of 2, 4 or 8 bits.
        chunk: targets at once at most (None: `TOKENS`).
    """

    def __init__(self, form: HeadForm, chunk: int | None = None):
        self.form = form
        self.matrix = form.matrix
        self.chunk = min(chunk or TOKENS, TOKENS)
        self.parameters: list[torch.Tensor] = []
        if not unpackable(form):
            raise ValueError("the online head reads affine matrices of 2, 4 or 8 bits in groups of 32, 64 or 128")

    def log_probs(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        return self._run(hidden_MH, token_M, None)[0]

    def backward(self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor):
        log_probs, dhidden = self._run(hidden_MH, token_M, cotangent_M.float().contiguous())
        assert dhidden is not None
        return log_probs, dhidden.to(hidden_MH.dtype), []

    @torch.no_grad()
    def _run(
        self, hidden_MH: torch.Tensor, token_M: torch.Tensor, cotangent_M: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = self.form.weight.dtype if self.form.packed is None else hidden_MH.dtype
        hidden_MH = hidden_MH.to(dtype).contiguous()
        log_probs = torch.empty(token_M.numel(), dtype=torch.float32, device=hidden_MH.device)
        dhidden = None if cotangent_M is None else torch.empty_like(hidden_MH)
        # Triton launches on the current device.
        with torch.autocast(hidden_MH.device.type, enabled=False), torch.cuda.device_of(hidden_MH):
            for start in range(0, token_M.numel(), self.chunk):
                own = slice(start, start + self.chunk)
                picked, lse = self._statistics(hidden_MH[own], token_M[own])
                log_probs[own] = picked - lse
                if dhidden is not None and cotangent_M is not None:
                    dhidden[own] = self._hidden_gradient(hidden_MH[own], token_M[own], cotangent_M[own], lse)
        return log_probs, dhidden

    def _statistics(self, hidden: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the targets and log-sum-exps, fp32 [M] each."""
        from longtune.head.triton_online import statistics_kernel

        options = self._options(hidden)
        rows, blocks = _grid(hidden.shape[0], self.matrix.shape[0], options)
        partial = torch.empty(blocks, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        picked = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        kernel: Any = statistics_kernel
        kernel[(rows, blocks)](
            hidden, *self._pointers(hidden), token, partial, picked, hidden.shape[0], self.matrix.shape[0],
            **options,
        )  # fmt: skip
        return picked, torch.logsumexp(partial, 0)

    def _hidden_gradient(
        self, hidden: torch.Tensor, token: torch.Tensor, cotangent: torch.Tensor, lse: torch.Tensor
    ) -> torch.Tensor:
        from longtune.head.triton_online import gradient_kernel

        options = self._options(hidden)
        V = self.matrix.shape[0]
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        gradient = torch.empty(hidden.shape[0], min(SLICE, -(-V // 64) * 64), dtype=hidden.dtype, device=hidden.device)
        kernel: Any = gradient_kernel
        for first in range(0, V, SLICE):
            last = min(first + SLICE, V)
            kernel[_grid(hidden.shape[0], last - first, options)](
                hidden, *self._pointers(hidden), token, cotangent, lse, gradient, first, hidden.shape[0], last,
                stride_gradient=gradient.stride(0), **options,
            )  # fmt: skip
            part = gradient[:, : last - first]
            if self.form.packed is None:
                add_product(total, part, self.form.weight[first:last])
            else:
                add_product(total, part, self.form.packed.dequantise(hidden.dtype, slice(first, last)))
        return total

    def _pointers(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The matrix's words (or numbers), scales, zeros and bias; what there is none of is never read."""
        bias = hidden if self.form.bias is None else self.form.bias.detach()
        packed: Any = self.form.packed
        if packed is None:
            return self.form.weight.detach(), hidden, hidden, bias
        source = getattr(packed, "source", packed)
        return source.weight, source.scales, source.biases, bias

    def _options(self, hidden: torch.Tensor) -> dict[str, Any]:
        packed: Any = self.form.packed
        source = getattr(packed, "source", packed)
        wide = hidden.dtype == torch.float32
        options: dict[str, Any] = dict(
            stride_hidden=hidden.stride(0),
            stride_weight=self.form.weight.stride(0),
            stride_scale=0,
            hidden_size=self.matrix.shape[1],
            scale=self.form.scale,
            softcap=self.form.softcap or 1.0,
            HAS_BIAS=self.form.bias is not None,
            HAS_SOFTCAP=self.form.softcap is not None,
            BITS=0,
            GROUP=1,
            BLOCK_M=64 if wide else 128,
            BLOCK_V=64 if wide else 256 if _roomy(hidden.device) else 128,
            BLOCK_K=32 if wide else 64,
            PRECISION="ieee" if wide else "tf32",
            num_warps=4 if wide else 8,
            num_stages=2 if wide else 3,
        )
        if packed is not None:
            group = source.format.group_size
            options |= dict(
                stride_scale=source.scales.stride(0),
                BITS=source.format.bits,
                GROUP=group,
                BLOCK_K=min(group, 32 if wide else 64),
            )
        return options | dict(EVEN=self.matrix.shape[1] % options["BLOCK_K"] == 0)


def _roomy(device: torch.device) -> bool:
    """Whether a program may take 144 KiB of shared memory (data-centre cards since compute capability 8.0)."""
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 160 << 10


def _grid(rows: int, columns: int, options: dict[str, Any]) -> tuple[int, int]:
    return -(-rows // options["BLOCK_M"]), -(-columns // options["BLOCK_V"])


def unpackable(form: HeadForm) -> bool:
    """Whether the kernels read the matrix as it is."""
    if form.packed is None:
        return True
    source: Any = getattr(form.packed, "source", form.packed)
    format = source.format
    return format.mode == "affine" and format.bits in (2, 4, 8) and format.group_size in (32, 64, 128)
