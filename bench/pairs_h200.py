"""One preference pair on a GPU: `tree`, `off`, and transformers with gradient checkpointing and a chunked loss.

LoRA r=16 on every linear of the layers, random bf16 weights at a real shape, one pair in a step, DPO with a cached
reference. Peak is `torch.cuda.max_memory_allocated`, weights included; on a CPU only the seconds are measured.

    python bench/pairs_h200.py --out results.json
    python bench/pairs_h200.py --shape tiny --prompt 96 --answer 16
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from common import RANK, SHAPES, build, machine, measure, preference_tree, with_checkpointing
from torch.nn.functional import linear, logsigmoid
from torch.utils.checkpoint import checkpoint

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.objective import get
from longtune.tree import Forest

HEAD_CHUNK = 1024
"""Targets of which both sides make logits at once."""


def checkpointed(model: torch.nn.Module, method: str, prompt: int, answer: int) -> Callable[[], float]:
    """Both sequences as one batch of two; log-probs of the targets alone, in checkpointed chunks.

    The losses are written out once more: DPO with beta 0.1, ORPO with lambda 0.1 over the whole chosen sequence.
    """
    wrapped = with_checkpointing(model)
    base = wrapped.get_base_model()
    head, device = base.lm_head.weight, base.lm_head.weight.device
    tree = preference_tree(prompt, answer, base.config.vocab_size, shared=False)
    ids = torch.stack([node.tokens for node in tree.nodes]).to(device)
    reference_c, reference_r = tree.reference or (0.0, 0.0)

    def log_probs_of(hidden: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, head).float()
        return -torch.nn.functional.cross_entropy(logits, label, reduction="none")

    def chunked(hidden: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        parts = zip(hidden.split(HEAD_CHUNK), label.split(HEAD_CHUNK), strict=True)
        return torch.cat([checkpoint(log_probs_of, h, y, use_reentrant=False) for h, y in parts])

    def step() -> float:
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        first = 0 if method == "orpo" else prompt - 1
        lp_c = chunked(hidden[0, first:], ids[0, 1 + first :])
        lp_r = chunked(hidden[1, prompt - 1 :], ids[1, prompt:])
        if method == "dpo":
            loss = -logsigmoid(0.1 * ((lp_c.sum() - reference_c) - (lp_r.sum() - reference_r)))
        else:
            c, r = lp_c[prompt - 1 :].mean(), lp_r.mean()
            odds = (c - r) - (torch.log1p(-c.exp()) - torch.log1p(-r.exp()))
            loss = -lp_c.mean() - 0.1 * logsigmoid(odds)
        loss.backward()
        wrapped.zero_grad()
        return loss.item()

    return step


def walked(model: torch.nn.Module, engine: Engine, method: str, prompt: int, answer: int, shared: bool):
    """A step of longtune; the forest is made once, as a run makes it while the card works."""
    objective = get(method)
    tree = preference_tree(prompt, answer, engine.stack.model.config.vocab_size, shared=shared)
    forest = Forest([tree], prompt_targets=objective.uses_prompt_targets)

    def step() -> float:
        loss = engine.accumulate(forest, objective, objective.totals(forest))["loss"]
        model.zero_grad()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--answer", type=int, default=1024, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--keep", nargs="*", default=["attention"])
    parser.add_argument("--store", default="host")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, object]] = []

    def record(method: str, way: str, tokens: int, step: Callable[[], float]) -> None:
        rows.append({"method": method, "way": way, "tokens": tokens, **measure(step, device == "cuda", args.repeats)})
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            settings = {k: v for k, v in vars(args).items() if k != "out"}
            Path(args.out).write_text(json.dumps({"machine": machine(), "settings": settings, "rows": rows}, indent=1))

    apart, together = 2 * (args.prompt + args.answer), args.prompt + 2 * args.answer
    methods = ("orpo", "dpo")
    if not args.skip_peer:
        for method in methods:
            step = checkpointed(build(args.shape, device), method, args.prompt, args.answer)
            record(method, "transformers + checkpointing, chunked loss", apart, step)
            del step
            gc.collect()
    model = add_lora(build(args.shape, device), rank=RANK, alpha=2 * RANK)
    model.train()
    for keep in args.keep:
        engine = Engine(
            model, Plan(chunk_tokens=args.chunk, boundary_store=args.store, head_chunk=HEAD_CHUNK, keep=keep)
        )
        for method in methods:
            for way, tokens in (("off", apart), ("tree", together)):
                step = walked(model, engine, method, args.prompt, args.answer, way == "tree")
                record(method, f"{way}, chunk {args.chunk}, {args.store}, keep {keep}", tokens, step)
        engine.close()
    print(f"{'method':>6} {'tokens':>8} {'seconds':>8} {'GiB':>6} {'loss':>9}  way")
    for row in rows:
        print(
            f"{row['method']:>6} {row['tokens']:>8,} {row['seconds']:>8.2f} {row['peak_gib']:>6.1f} "
            f"{row['loss']:>9.4f}  {row['way']}"
        )


if __name__ == "__main__":
    main()
