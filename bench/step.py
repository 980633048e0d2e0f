"""Peak memory and seconds of one training step: longtune beside transformers with gradient checkpointing.

One sequence, LoRA r=16 on every linear of the layers, random weights at a real shape. Peak is
`torch.cuda.max_memory_allocated`, weights included; on a CPU only the seconds are measured.

    python bench/step.py --shape llama-8b --tokens 32768 131072 --out results.json
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from datetime import date

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.objective import get
from longtune.tree import Forest, Tree

SHAPES = {
    "llama-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "tiny": dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}
RANK = 16


def build(shape: str, device: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(**SHAPES[shape], max_position_embeddings=1 << 20, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.requires_grad_(False)


def checkpointed(model: torch.nn.Module) -> Callable[[torch.Tensor], float]:
    """transformers + PEFT + gradient checkpointing; cross-entropy in checkpointed chunks of 4,096 tokens."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=targets))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped.train()
    head = model.lm_head.weight

    def loss_of(hidden: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, head).float()
        return torch.nn.functional.cross_entropy(logits, label, reduction="sum")

    def step(tokens: torch.Tensor) -> float:
        hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]
        loss = torch.zeros((), device=tokens.device)
        for start in range(0, hidden.shape[0], 4096):
            part = slice(start, start + 4096)
            loss = loss + checkpoint(loss_of, hidden[part], tokens[1:][part], use_reentrant=False)
        (loss / hidden.shape[0]).backward()
        wrapped.zero_grad()
        return float(loss / hidden.shape[0])

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


def measure(step: Callable[[torch.Tensor], float], tokens: torch.Tensor, repeats: int) -> dict[str, float]:
    cuda = tokens.is_cuda
    seconds, loss = [], 0.0
    for _ in range(repeats):
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(tokens)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    return {"seconds": min(seconds), "first_seconds": seconds[0], "peak_gib": peak, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2, help="runs of the shortest row; longer ones run once")
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
        entry = {"tokens": n, "way": way, **measure(step, rows[n], args.repeats if n == min(rows) else 1)}
        table.append(entry)
        print(json.dumps(entry), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump({"machine": machine, "rows": table}, file, indent=1)

    machine = {
        "date": str(date.today()),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "shape": args.shape,
    }
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
