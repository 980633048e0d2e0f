"""The peer of `short_rows.py`: transformers + PEFT + Liger over rows laid end to end, or over a padded batch.

Packing is that of `flash_attention_2`: position ids restart with each row, and `cu_seq_lens_q` and `max_length_q` reach
the attention function through the model's arguments. The flash-attn package need not be there: an entry of
transformers' `AttentionInterface` calls FlashAttention-2 of torch, sequences of varying length. Without CUDA the same
entry attends row by row, and Liger is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from typing import Any

import torch
from common import LINEARS, RANK, build
from torch.nn.functional import cross_entropy, linear, logsigmoid, scaled_dot_product_attention

from longtune.tree import Forest

ADAPTERS = ("bf16", "autocast", "fp32")
"""Masters of the adapter: bf16; fp32 under autocast, inputs not cast by PEFT; fp32 as PEFT computes them by itself."""


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TKD, v_TKD, ends, longest, scale):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, ends, ends, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out, lse, ends)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, ends = ctx.saved_tensors
        none = torch.empty(0, dtype=torch.uint64, device=q.device)
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, ends, ends, ctx.longest, ctx.longest, 0.0, True, state, none, scale=ctx.scale
        )
        return (*grads, None, None, None)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature, query [B, H, T, D]; causal within each row of the batch, or each sequence."""

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)

    if cu_seq_lens_q is None:
        return plain(query, key, value), None
    if query.is_cuda:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _Varlen.apply(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None
    ends = cu_seq_lens_q.tolist()
    parts = [plain(*(x[:, :, start:end] for x in (query, key, value))) for start, end in pairwise(ends)]
    return torch.cat(parts, 1), None


class Peer:
    """A model with PEFT's adapter, to be trained by `step_of`."""

    def __init__(self, shape: str, device: str, dtype: torch.dtype):
        from peft import LoraConfig, get_peft_model
        from transformers import AttentionInterface

        self.device, self.liger = device, device == "cuda"
        if self.liger:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
            self._token_losses = LigerFusedLinearCrossEntropyLoss(reduction="none")
        AttentionInterface.register("packed-rows", attend)
        self.base: Any = build(shape, device).to(dtype)
        self.base.set_attn_implementation("packed-rows")
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEARS)
        self.model: Any = get_peft_model(self.base, config)
        self.model.train()
        self._autocast = False

    @property
    def layers(self) -> int:
        return len(self.base.model.layers)

    def set(self, adapters: str, checkpointed: int) -> None:
        """Choose the adapter's masters, and of how many layers nothing but the input is kept."""
        if self.device == "cuda":
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16 if adapters == "bf16" else torch.float32)
        self._autocast = adapters == "autocast"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for index, layer in enumerate(self.base.model.layers):
            layer.gradient_checkpointing = index < checkpointed

    def _precision(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if self._autocast and self.device == "cuda":
            from peft.helpers import disable_input_dtype_casting

            stack.enter_context(disable_input_dtype_casting(self.model))
            stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        return stack

    def token_losses(self, hidden_MH: torch.Tensor, token_M: torch.Tensor) -> torch.Tensor:
        """-log p(token | hidden) [M], with graph."""
        weight = self.base.lm_head.weight
        if self.liger:
            return self._token_losses(weight, hidden_MH, token_M)
        return cross_entropy(linear(hidden_MH, weight).float(), token_M, reduction="none")

    def step_of(self, part: str, padded: bool = False) -> Callable[[dict[str, Any]], float]:
        """Forward and backward of one micro-batch (`batch`); returns the loss. Gradients stay in `.grad`."""
        loss_of = {"sft": self._sft, "pairs": self._orpo}[part]

        def step(batch: dict[str, Any]) -> float:
            here = {
                k: v.to(self.device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()
            }
            with self._precision():
                loss = loss_of(here)
            loss.backward()
            return loss.item()

        return step

    def _sft(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.model(**batch, use_cache=False).loss

    def _orpo(self, batch: dict[str, Any]) -> torch.Tensor:
        """As TRL's ORPO: the likelihood of the whole chosen sequence, and the odds of mean log-probs (beta 0.1)."""
        answer, tree, count = batch.pop("answer"), batch.pop("tree"), batch.pop("count")
        hidden, token = batch.pop("hidden"), batch.pop("token")
        states = self.base.model(**batch, use_cache=False).last_hidden_state
        lp = -self.token_losses(states.flatten(0, 1)[hidden], token).float()
        both = torch.stack([_means(lp, tree, answer == number, count) for number in (0, 1)])
        chosen, rejected = both[0], both[1]
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        likelihood = (lp * (answer <= 0)).sum() / (answer <= 0).sum()
        return -likelihood - 0.1 * logsigmoid(odds).mean()


def _means(lp_M: torch.Tensor, tree_M: torch.Tensor, of_M: torch.Tensor, count: int) -> torch.Tensor:
    total = torch.zeros(count, device=lp_M.device).index_add(0, tree_M, lp_M * of_M)
    return total / torch.zeros(count, device=lp_M.device).index_add(0, tree_M, of_M.float())


def batch(part: str, forest: Forest, padded: bool = False) -> dict[str, Any]:
    """A micro-batch of whole sequences (each node a root) as the model's arguments, on the CPU.

    Packed: one row, with where each sequence ends. Padded (pairs alone): one row for each sequence, padded on the
    right, where causal attention needs no mask.
    """
    lengths = [node.tokens.numel() for tree in forest.trees for node in tree.nodes]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    targets = forest.targets
    hidden = targets.hidden
    if padded:
        width = max(lengths)
        place = torch.cat([torch.arange(n) + index * width for index, n in enumerate(lengths)])
        tokens = torch.zeros(len(lengths) * width, dtype=torch.int64)
        tokens[place] = forest.tokens
        hidden = place[hidden]
        made: dict[str, Any] = {"input_ids": tokens.view(-1, width)}
    else:
        made = {
            "input_ids": forest.tokens[None],
            "position_ids": forest.positions[None],
            "cu_seq_lens_q": ends.to(torch.int32),
            "cu_seq_lens_k": ends.to(torch.int32),
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
    if part == "sft":
        labels = torch.full_like(forest.tokens, -100)
        labels[targets.hidden + 1] = targets.token
        return {**made, "labels": labels[None]}
    return {
        **made,
        "hidden": hidden,
        "token": targets.token,
        "answer": targets.answer,
        "tree": targets.tree,
        "count": len(forest.trees),
    }
