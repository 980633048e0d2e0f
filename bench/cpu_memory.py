"""Memory above the loaded model and seconds of a step on a CPU: longtune beside transformers + PEFT with checkpointing.

SmolLM2-135M in fp32, one row of T tokens, LoRA r=8 on every linear of the layers. Each way runs in a fresh process;
memory is the peak resident set during the steps, less the resident set with the model and adapter loaded.

    python bench/cpu_memory.py --tokens 4096 --out results.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from common import compared, machine, race, report, with_checkpointing

WAYS = ("transformers", "longtune")


def transformers_step(tokens: int) -> tuple[Callable[[], float], object]:
    import torch

    from longtune.model.loading import load_model

    wrapped = with_checkpointing(load_model("smollm2", dtype="float32", device="cpu").model, rank=8)
    ids = torch.randint(10, 40000, (1, tokens), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        wrapped.zero_grad()
        return float(loss.detach())

    return step, wrapped


def longtune_step(tokens: int, chunk: int, keep: str) -> tuple[Callable[[], float], object]:
    import torch

    from longtune.engine import Engine, Plan
    from longtune.model.adapters import add_lora
    from longtune.model.loading import load_model
    from longtune.objective import get
    from longtune.tree import Forest, Tree

    model = add_lora(load_model("smollm2", dtype="float32", device="cpu").model, rank=8, alpha=16)
    model.train()
    engine = Engine(model, Plan(chunk_tokens=chunk, head_chunk=256, keep=keep))  # pyright: ignore[reportArgumentType]
    ids = torch.randint(10, 40000, (1, tokens), generator=torch.Generator().manual_seed(0))
    forest, objective = Forest([Tree.sequence(ids[0])]), get("sft")

    def step() -> float:
        loss = engine.accumulate(forest, objective, objective.totals(forest))["loss"]
        model.zero_grad()
        return loss

    return step, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--keep", default="attention")
    parser.add_argument("--repeats", type=int, default=2, help="steps in each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each way, taken in turn")
    parser.add_argument("--out")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way == "transformers":
        report(args.way, lambda: transformers_step(args.tokens), args.repeats)
        return
    if args.way:
        report(args.way, lambda: longtune_step(args.tokens, args.chunk, args.keep), args.repeats)
        return
    settings = {k: getattr(args, k) for k in ("tokens", "chunk", "keep", "repeats")}
    found = race(__file__, WAYS, args.rounds, [f"--{k}={v}" for k, v in settings.items()])
    result = {
        **machine(),
        "settings": {**settings, "rounds": args.rounds},
        **compared(found, "longtune", "transformers"),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps({**result, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
