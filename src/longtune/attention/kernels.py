"""Attention of a block of queries over a block of keys, forward and backward, with log-sum-exp.

Everything that knows of paths, chunks, windows and sinks lives in `path.py`; a kernel sees two rectangles.
Because a forward returns the log-sum-exp, blocks merge exactly, and because a backward takes the merged output and
log-sum-exp, the gradient of each block is its exact share (FlashAttention-2, arXiv:2307.08691, section 3.1).

Shapes: B = 1, H query heads, K key heads (H a multiple of K), S queries, T keys, D key width, E value width.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch.nn.functional import pad


class Kernel(Protocol):
    """A block attention backend.

    `causal` is only given for squares (S == T) whose queries are the keys' own tokens. `mask` is a boolean [S, T],
    True where a query sees a key; every query sees at least one key. `softcap` c replaces a score z by c tanh(z / c).
    """

    name: str
    supports_softcap: bool

    def forward(
        self,
        q_BHSD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTE: torch.Tensor,
        *,
        scale: float,
        causal: bool = False,
        mask: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, H, S, E] in the queries' dtype and log-sum-exp [B, H, S] in fp32 (fp64 for fp64)."""
        ...

    def backward(
        self,
        dout_BHSE: torch.Tensor,
        q_BHSD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTE: torch.Tensor,
        out_BHSE: torch.Tensor,
        lse_BHS: torch.Tensor,
        *,
        scale: float,
        causal: bool = False,
        mask: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dQ, dK, dV of this block, given the output and log-sum-exp over all blocks."""
        ...

    def arrange(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        """The tensor in the memory layout that the kernel wants, so that many blocks bring it there once."""
        ...


def _fold(x_BHSD: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[B, H, S, D] -> [B, K, (H / K) S, D]: the query heads of a group become queries of their key head."""
    B, H, S, D = x_BHSD.shape
    return x_BHSD.reshape(B, key_heads, H // key_heads * S, D)


def _tile(mask_ST: torch.Tensor, groups: int) -> torch.Tensor:
    """[S, T] -> [groups * S, T], in the order of `_fold`."""
    return mask_ST.repeat(groups, 1)


def _repeat_heads(k_BKTD: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values for every query head."""
    return k_BKTD if k_BKTD.shape[1] == heads else k_BKTD.repeat_interleave(heads // k_BKTD.shape[1], dim=1)


def _sum_heads(dk_BHTD: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Gradients of `_repeat_heads`' result back to the key heads."""
    return dk_BHTD if dk_BHTD.shape[1] == key_heads else dk_BHTD.unflatten(1, (key_heads, -1)).sum(2)


class Reference:
    """Explicit scores: any dtype, softcap, values of another width. Scores are bounded by splitting the queries.

    Args:
        score_bytes: upper bound of one score matrix in memory; a single query may exceed it.
    """

    name = "reference"
    supports_softcap = True

    def __init__(self, score_bytes: int = 64 << 20):
        self.score_bytes = score_bytes

    def arrange(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        return x_BHSD

    def _rows(self, q_BHSD: torch.Tensor, k_BKTD: torch.Tensor) -> list[slice]:
        queries, keys = q_BHSD.shape[2], k_BKTD.shape[2]
        wide = 8 if q_BHSD.dtype == torch.float64 else 4
        rows = max(1, self.score_bytes // (q_BHSD.shape[1] * keys * wide))
        return [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)]

    @staticmethod
    def _scores(
        q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None, mask_ST: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Masked scores in fp32 (fp64), and d(score)/d(raw score) where softcap makes it other than one."""
        wide = torch.promote_types(q.dtype, torch.float32)
        # Widened before the product: scores rounded to bf16 would cost more precision than any fused kernel does.
        scores = torch.matmul(_fold(q, k.shape[1]).to(wide), k.to(wide).transpose(2, 3)) * scale
        slope = None
        if softcap is not None:
            bent = torch.tanh(scores / softcap)
            slope = 1 - bent * bent
            scores = bent * softcap
        if mask_ST is not None:
            scores.masked_fill_(~_tile(mask_ST, q.shape[1] // k.shape[1]), -math.inf)
        return scores, slope

    def _mask(
        self, rows: slice, keys: int, causal: bool, mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        if mask is not None:
            return mask[rows]
        if not causal:
            return None
        query = torch.arange(rows.start, rows.stop, device=device)
        return query[:, None] >= torch.arange(keys, device=device)[None, :]

    def forward(self, q_BHSD, k_BKTD, v_BKTE, *, scale, causal=False, mask=None, softcap=None):
        B, H, S, _ = q_BHSD.shape
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        out = q_BHSD.new_empty(B, H, S, v_BKTE.shape[3])
        lse = q_BHSD.new_empty(B, H, S, dtype=wide)
        for rows in self._rows(q_BHSD, k_BKTD):
            q = q_BHSD[:, :, rows]
            seen = self._mask(rows, k_BKTD.shape[2], causal, mask, q.device)
            scores, _ = self._scores(q, k_BKTD, scale, softcap, seen)
            total = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - total[..., None])
            out[:, :, rows] = torch.matmul(weights, v_BKTE.to(wide)).reshape(B, H, -1, v_BKTE.shape[3])
            lse[:, :, rows] = total.reshape(B, H, -1)
        return out, lse

    def backward(
        self, dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS, *, scale, causal=False, mask=None, softcap=None
    ):
        heads = k_BKTD.shape[1]
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        dq = torch.empty_like(q_BHSD)
        dk = torch.zeros_like(k_BKTD, dtype=wide)
        dv = torch.zeros_like(v_BKTE, dtype=wide)
        for rows in self._rows(q_BHSD, k_BKTD):
            q = q_BHSD[:, :, rows]
            dout = _fold(dout_BHSE[:, :, rows], heads).to(wide)
            seen = self._mask(rows, k_BKTD.shape[2], causal, mask, q.device)
            scores, slope = self._scores(q, k_BKTD, scale, softcap, seen)
            lse = lse_BHS[:, :, rows].reshape(*scores.shape[:3])
            weights = torch.exp(scores - lse[..., None])
            dv += torch.matmul(weights.transpose(2, 3), dout)
            delta = (dout * _fold(out_BHSE[:, :, rows], heads).to(wide)).sum(-1, keepdim=True)
            dscores = weights * (torch.matmul(dout, v_BKTE.to(wide).transpose(2, 3)) - delta)
            if slope is not None:
                dscores *= slope
            dscores *= scale
            dq[:, :, rows] = torch.matmul(dscores, k_BKTD.to(wide)).reshape(q.shape)
            dk += torch.matmul(dscores.transpose(2, 3), _fold(q, heads).to(wide))
        return dq, dk.to(k_BKTD.dtype), dv.to(v_BKTE.dtype)


class _EqualWidth:
    """Adapts a kernel that wants values as wide as keys: values are padded with zeros, results cut back."""

    def arrange(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        return x_BHSD

    @staticmethod
    def widen(x: torch.Tensor, width: int) -> torch.Tensor:
        return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


class CpuFlash(_EqualWidth):
    """torch's flash attention for the CPU (`_scaled_dot_product_flash_attention_for_cpu`)."""

    name = "cpu-flash"
    supports_softcap = False

    @staticmethod
    def _bias(mask: torch.Tensor | None, q: torch.Tensor, groups: int) -> torch.Tensor | None:
        if mask is None:
            return None
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
        return _tile(bias, groups)[None, None]

    def forward(self, q_BHSD, k_BKTD, v_BKTE, *, scale, causal=False, mask=None, softcap=None):
        B, H, S, D = q_BHSD.shape
        E = v_BKTE.shape[3]
        v = self.widen(v_BKTE, D)
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if causal:
            out, lse = run(q_BHSD, _repeat_heads(k_BKTD, H), _repeat_heads(v, H), 0.0, True, scale=scale)
        else:
            groups = H // k_BKTD.shape[1]
            out, lse = run(
                _fold(q_BHSD, k_BKTD.shape[1]), k_BKTD, v, attn_mask=self._bias(mask, q_BHSD, groups), scale=scale
            )
            out, lse = out.reshape(B, H, S, D), lse.reshape(B, H, S)
        return out[..., :E], lse

    def backward(
        self, dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS, *, scale, causal=False, mask=None, softcap=None
    ):
        B, H, S, D = q_BHSD.shape
        K, E = k_BKTD.shape[1], v_BKTE.shape[3]
        dout, out, v = (self.widen(x, D) for x in (dout_BHSE, out_BHSE, v_BKTE))
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        if causal:
            k_, v_ = _repeat_heads(k_BKTD, H), _repeat_heads(v, H)
            dq, dk, dv = run(dout, q_BHSD, k_, v_, out, lse_BHS, 0.0, True, scale=scale)
            dk, dv = _sum_heads(dk, K), _sum_heads(dv, K)
        else:
            dq, dk, dv = run(
                _fold(dout, K),
                _fold(q_BHSD, K),
                k_BKTD,
                v,
                _fold(out, K),
                lse_BHS.reshape(B, K, -1),
                0.0,
                False,
                attn_mask=self._bias(mask, q_BHSD, H // K),
                scale=scale,
            )
            dq = dq.reshape(B, H, S, D)
        return dq, dk, dv[..., :E]


class CudaEfficient(_EqualWidth):
    """torch's memory-efficient attention (`_scaled_dot_product_efficient_attention`), fp32; the reference takes the
    place of anything else, since in bf16 its backward gives wrong dQ at odd lengths on an H200 (torch 2.11).

    The one fused CUDA kernel of torch that takes fp32, whose products it splits in three of tf32 each. It knows no
    grouped heads: the query heads of a group become queries of their key head, or, where the mask is causal, keys and
    values are repeated.
    """

    name = "cuda-efficient"
    supports_softcap = False

    @staticmethod
    def _elsewhere(q_BHSD: torch.Tensor, mask: torch.Tensor | None) -> bool:
        return mask is not None or q_BHSD.dtype != torch.float32 or q_BHSD.shape[3] % 4 != 0

    def forward(self, q_BHSD, k_BKTD, v_BKTE, *, scale, causal=False, mask=None, softcap=None):
        if self._elsewhere(q_BHSD, mask):
            return _REFERENCE.forward(q_BHSD, k_BKTD, v_BKTE, scale=scale, causal=causal, mask=mask)
        B, H, S, D = q_BHSD.shape
        q, k, v = q_BHSD, k_BKTD, self.widen(v_BKTE, D)
        if causal:
            k, v = _repeat_heads(k, H), _repeat_heads(v, H)
        else:
            q = _fold(q, k.shape[1])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        # Rows of log-sum-exps are filled up to a multiple of 32.
        lse = lse[..., : q.shape[2]].reshape(B, H, S)
        return out.reshape(B, H, S, D)[..., : v_BKTE.shape[3]], lse

    def backward(
        self, dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS, *, scale, causal=False, mask=None, softcap=None
    ):
        if self._elsewhere(q_BHSD, mask):
            given = (dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS)
            return _REFERENCE.backward(*given, scale=scale, causal=causal, mask=mask)
        H, D, K, E = q_BHSD.shape[1], q_BHSD.shape[3], k_BKTD.shape[1], v_BKTE.shape[3]
        dout, out, v = (self.widen(x, D) for x in (dout_BHSE, out_BHSE, v_BKTE))
        q, k, lse = q_BHSD, k_BKTD, lse_BHS
        if causal:
            k, v = _repeat_heads(k, H), _repeat_heads(v, H)
        else:
            q, dout, out = (_fold(x, K) for x in (q, dout, out))
            lse = lse.reshape(*q.shape[:3])
        lse = pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq.reshape(q_BHSD.shape), _sum_heads(dk, K), _sum_heads(dv, K)[..., :E]


class CudaFlash(_EqualWidth):
    """FlashAttention-2 as built into torch for CUDA (`_flash_attention_forward`); bf16 and fp16."""

    name = "cuda-flash"
    supports_softcap = False

    def forward(self, q_BHSD, k_BKTD, v_BKTE, *, scale, causal=False, mask=None, softcap=None):
        if mask is not None:
            return _REFERENCE.forward(q_BHSD, k_BKTD, v_BKTE, scale=scale, mask=mask)
        D, E = q_BHSD.shape[3], v_BKTE.shape[3]
        q, k, v = (self.widen(x, D).transpose(1, 2) for x in (q_BHSD, k_BKTD, v_BKTE))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2)[..., :E], lse

    def backward(
        self, dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS, *, scale, causal=False, mask=None, softcap=None
    ):
        if mask is not None:
            return _REFERENCE.backward(dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS, scale=scale, mask=mask)
        D, E = q_BHSD.shape[3], v_BKTE.shape[3]
        dout, q, k, v, out = (self.widen(x, D).transpose(1, 2) for x in (dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE))
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse_BHS.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            state,
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=scale,
        )
        return tuple(x.transpose(1, 2) for x in (dq, dk, dv[..., :E]))


class Cudnn(_EqualWidth):
    """cuDNN's attention through torch (`_scaled_dot_product_cudnn_attention`); bf16 and fp16.

    torch caches cuDNN's compiled backward under a key without the memory layout of grad_out, so a layout seen
    first is baked in for its shape and another layout later gives wrong gradients. Every tensor is therefore brought to
    one layout (dense [B, S, H, D] behind a transposed view) before each call. A graph is compiled for every new shape
    too, and there is none for a single token: blocks whose sides are not multiples of `grain` go to FlashAttention-2.
    """

    name = "cudnn"
    supports_softcap = False

    def __init__(self, grain: int = 512):
        self.grain = grain

    def _elsewhere(self, q_BHSD: torch.Tensor, k_BKTD: torch.Tensor, mask: torch.Tensor | None) -> Kernel | None:
        if mask is not None:
            return _REFERENCE
        return _CUDA_FLASH if q_BHSD.shape[2] % self.grain or k_BKTD.shape[2] % self.grain else None

    def arrange(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        return x_BHSD.transpose(1, 2).contiguous().transpose(1, 2)

    def forward(self, q_BHSD, k_BKTD, v_BKTE, *, scale, causal=False, mask=None, softcap=None):
        if other := self._elsewhere(q_BHSD, k_BKTD, mask):
            return other.forward(q_BHSD, k_BKTD, v_BKTE, scale=scale, causal=causal, mask=mask)
        D, E = q_BHSD.shape[3], v_BKTE.shape[3]
        q, k, v = (self.arrange(self.widen(x, D)) for x in (q_BHSD, k_BKTD, v_BKTE))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out[..., :E], lse.reshape(lse.shape[:3])

    def backward(
        self, dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS, *, scale, causal=False, mask=None, softcap=None
    ):
        if other := self._elsewhere(q_BHSD, k_BKTD, mask):
            given = (dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE, lse_BHS)
            return other.backward(*given, scale=scale, causal=causal, mask=mask)
        D, E = q_BHSD.shape[3], v_BKTE.shape[3]
        dout, q, k, v, out = (self.arrange(self.widen(x, D)) for x in (dout_BHSE, q_BHSD, k_BKTD, v_BKTE, out_BHSE))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse_BHS.unsqueeze(-1).contiguous(),
            seed,
            seed,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            scale=scale,
        )
        return dq, dk, dv[..., :E]


_REFERENCE = Reference()
_CUDA_FLASH = CudaFlash()
