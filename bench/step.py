"""Peak memory and seconds of one training step: longtune beside transformers with gradient checkpointing.

One sequence, LoRA r=16 on every linear of the layers, random weights at a real shape. Peak is
`torch.cuda.max_memory_allocated`, weights included; on a CPU only the seconds are measured.

    python bench/step.py --shape llama-8b --tokens 32768 131072 --out results.json
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable

import torch
from common import RANK, SHAPES, build, chunked_loss, machine, measure, with_checkpointing

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.objective import get
from longtune.tree import Forest, Tree


def checkpointed(model: torch.nn.Module) -> Callable[[torch.Tensor], float]:
    """transformers + PEFT + gradient checkpointing; cross-entropy in checkpointed chunks of 4,096 tokens."""
    wrapped = with_checkpointing(model)

    def step(tokens: torch.Tensor) -> float:
        hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        loss = chunked_loss(hidden, tokens, model.lm_head.weight)
        loss.backward()
        wrapped.zero_grad()
        return float(loss.detach())

    return step


def walked(model: torch.nn.Module, plan: Plan, attention: str | None) -> Callable[[torch.Tensor], float]:
    wrapped = add_lora(model, rank=RANK, alpha=32) if not hasattr(model, "peft_config") else model
    wrapped.train()
    engine = Engine(wrapped, plan, attention=attention)
    objective = get("sft")

    def step(tokens: torch.Tensor) -> float:
        forest = Forest([Tree.sequence(tokens.cpu())])
        loss = engine.accumulate(forest, objective, objective.totals(forest))["loss"]
        wrapped.zero_grad()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2, help="runs of the shortest row")
    parser.add_argument("--long-repeats", type=int, default=2, help="runs of longer rows")
    parser.add_argument("--attention", nargs="*", default=[None])
    parser.add_argument("--keep", nargs="*", default=["nothing", "attention"])
    parser.add_argument("--store", default="host")
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {n: torch.randint(10, 500, (n,), device=device) for n in args.tokens}
    table: list[dict[str, object]] = []

    def record(way: str, n: int, step: Callable[[torch.Tensor], float]) -> None:
        repeats = args.repeats if n == min(rows) else args.long_repeats
        entry = {"tokens": n, "way": way, **measure(lambda: step(rows[n]), device == "cuda", repeats)}
        table.append(entry)
        print(json.dumps(entry), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump({"machine": described, "rows": table}, file, indent=1)

    described = {**machine(), "shape": args.shape}
    if not args.skip_peer:
        model = build(args.shape, device)
        step = checkpointed(model)
        for n in rows:
            record("transformers + checkpointing, chunked CE", n, step)
        del model, step
        gc.collect()
    model = add_lora(build(args.shape, device), rank=RANK, alpha=32)
    for attention in args.attention:
        for keep in args.keep:
            plan = Plan(chunk_tokens=args.chunk, boundary_store=args.store, keep=keep)
            step = walked(model, plan, attention)
            for n in rows:
                record(f"longtune {attention or 'default'} chunk {args.chunk} {args.store} keep {keep}", n, step)
    print(f"{'tokens':>8} {'seconds':>8} {'GiB':>6}  way")
    for entry in table:
        print(f"{entry['tokens']:>8} {entry['seconds']:>8.2f} {entry['peak_gib']:>6.1f}  {entry['way']}")


if __name__ == "__main__":
    main()
