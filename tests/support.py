"""Shared by the tests: tiny random models, an fp64-clean llama, and the oracle (plain autograd on each sequence)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from longtune.tree import Forest, Node, Targets, Tree

BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
WINDOWED = ["sliding_attention", "full_attention"] * 2

ARCHITECTURES: dict[str, dict] = {
    "llama": {},
    "qwen3": {},
    "gemma2": dict(sliding_window=12, layer_types=WINDOWED, query_pre_attn_scalar=8, final_logit_softcapping=2.0),
    "gemma3_text": dict(sliding_window=12, layer_types=WINDOWED, query_pre_attn_scalar=8),
    "gemma4_text": dict(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=12,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        global_head_dim=8,
        num_experts=None,
    ),
    "gemma3n_text": dict(
        num_hidden_layers=6,
        intermediate_size=[48] * 6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=12,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 6,
        altup_num_inputs=3,
    ),
    "mistral": dict(sliding_window=12),
    "gpt_oss": dict(
        num_local_experts=4, num_experts_per_tok=2, sliding_window=12, layer_types=WINDOWED, rope_scaling=None
    ),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "phi3": {},
    "smollm3": {},
}


def tiny_config(name: str, **changes):
    settings = {**BASE, **ARCHITECTURES.get(name, {}), **changes}
    if name == "deepseek_v3":
        settings.pop("head_dim")
    return AutoConfig.for_model(name, **settings)


def tiny_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> nn.Module:
    """A random model of a few thousand parameters, weights large enough that attention matters."""
    torch.manual_seed(seed)
    config = tiny_config(name, **changes)
    # Eager attention takes its softmax in fp32; sdpa keeps fp64, but has neither softcap nor sinks.
    attention = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.06)
            else:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


class CleanNorm(nn.Module):
    """RMS norm in the input's own dtype."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class CleanRotary(nn.Module):
    """Rotary embedding computed in fp64."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.register_buffer("frequency", rotary.inv_freq.double())

    def forward(self, x, position_ids):
        angle = position_ids[..., None].double() * self.frequency
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def clean_llama(seed: int = 0) -> nn.Module:
    """A tiny llama without transformers' fp32 upcasts: fp64 from end to end."""
    model = tiny_model("llama", seed=seed)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, CleanNorm(child))
    model.model.rotary_emb = CleanRotary(model.model.rotary_emb)
    return model


def with_lora(model: nn.Module, rank: int = 3, dropout: float = 0.0, seed: int = 1, targets=None) -> nn.Module:
    """Plain PEFT LoRA on every linear inside the layers, B not zero, in the model's dtype."""
    torch.manual_seed(seed)
    names = targets or sorted(
        {
            name.split(".")[-1]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".layers." in name
        }
    )
    pattern = r".*\.layers\..*\.(" + "|".join(names) + ")" if targets is None else targets
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=pattern, lora_dropout=dropout)
    peft = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return peft.to(next(model.parameters()).dtype)


def pair_tree(prompt: int = 37, answers: tuple[int, ...] = (23, 11), vocab: int = 97, seed: int = 0) -> Tree:
    """A prompt with answers, every answer token and every prompt token a target with its own weight."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, vocab, (n,), generator=generator)  # noqa: E731
    nodes = [Node(draw(prompt))] + [Node(draw(n), 0) for n in answers]
    hidden, token, answer = list(range(prompt - 1)), nodes[0].tokens[1:].tolist(), [-1] * (prompt - 1)
    column = prompt
    for number, node in enumerate(nodes[1:]):
        hidden += [prompt - 1, *range(column, column + node.tokens.numel() - 1)]
        token += node.tokens.tolist()
        answer += [number] * node.tokens.numel()
        column += node.tokens.numel()
    weight = torch.rand(len(hidden), generator=generator) + 0.5
    return Tree(tuple(nodes), Targets.of(hidden, token, weight, answer))


def random_sequence(tokens: int, vocab: int = 97, seed: int = 0) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (tokens,), generator=generator)
    return Tree.sequence(ids, torch.rand(tokens, generator=generator) + 0.5)


def oracle_log_probs(model: nn.Module, forest: Forest) -> torch.Tensor:
    """Log-probs of a forest's targets by the unmodified model: every root-to-leaf path as a sequence of its own."""
    out: list[torch.Tensor | None] = [None] * len(forest.targets)
    device = next(model.parameters()).device
    for number in range(len(forest._placed)):
        if any(other.parent == number for other in forest._placed):
            continue
        columns = torch.cat([torch.arange(a, b) for a, b in forest.path(number)])
        logits = model(input_ids=forest.tokens[columns][None].to(device), use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        where = {int(c): i for i, c in enumerate(columns)}
        on_path = set(where)
        for index, (hidden, token) in enumerate(
            zip(forest.targets.hidden.tolist(), forest.targets.token.tolist(), strict=True)
        ):
            if out[index] is not None or hidden not in on_path:
                continue
            at = where[hidden]
            if at + 1 < len(columns) and int(forest.tokens[columns[at + 1]]) == token:
                out[index] = log_probs[at, token]
    assert all(x is not None for x in out)
    return torch.stack(out)  # pyright: ignore[reportArgumentType]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


def walk_gradients(
    engine: Any, forest: Forest, cotangent: torch.Tensor, key: tuple[int, ...] = (0, 0)
) -> dict[str, torch.Tensor]:
    """Gradients of sum(cotangent * log-prob) by an engine's walk."""
    engine.model.zero_grad()
    walk = engine.walk(forest, key, grad=True)
    walk.forward()
    walk.head(cotangent)
    walk.backward()
    walk.sums.deliver()
    found = gradients(engine.model)
    engine.model.zero_grad()
    return found


def oracle_gradients(model: nn.Module, forest: Forest, cotangent: Callable | torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of sum(cotangent * log-prob) by ordinary autograd."""
    model.zero_grad()
    log_probs = oracle_log_probs(model, forest)
    (log_probs * cotangent.to(log_probs)).sum().backward()
    found = gradients(model)
    model.zero_grad()
    return found


def worst(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Largest relative difference over all tensors; both must have the same names."""
    assert ours.keys() == truth.keys(), sorted(ours.keys() ^ truth.keys())[:5]
    return max(
        float(
            torch.linalg.norm(ours[n].double() - truth[n].double())
            / torch.linalg.norm(truth[n].double()).clamp(min=1e-12)
        )
        for n in truth
    )


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
