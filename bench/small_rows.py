"""What the engine costs where everything fits: steps of short rows beside plain autograd, on the CPU.

SmolLM2-135M in fp32, LoRA r=8 on every linear of the layers, one row. Plain autograd is the model's own forward and
loss with the same adapter; the engine keeps everything in one chunk, as the planner chooses. Both ways in one process,
in turn; the median of each, and the median of the ratios of neighbours.

    python bench/small_rows.py --tokens 512 --rounds 15 --out small.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings

import torch
from common import machine

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.model.loading import load_model
from longtune.objective import get
from longtune.tree import Forest, Tree


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    args = parser.parse_args()
    model = add_lora(load_model("smollm2", dtype="float32", device="cpu").model, rank=8, alpha=16)
    model.train()
    engine = Engine(model, Plan(chunk_tokens=None, keep="everything"))
    objective = get("sft")

    def walked(tokens: torch.Tensor) -> float:
        forest = Forest([Tree.sequence(tokens)])
        return engine.accumulate(forest, objective, objective.totals(forest))["loss"]

    def plain(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens[None], labels=tokens[None], use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    seconds: dict[str, list[float]] = {"plain": [], "walked": []}
    generator = torch.Generator().manual_seed(0)
    for number in range(args.rounds + 2):
        tokens = torch.randint(10, 40000, (args.tokens,), generator=generator)
        losses = {}
        for name, step in (
            (("plain", plain), ("walked", walked)) if number % 2 else (("walked", walked), ("plain", plain))
        ):
            start = time.perf_counter()
            losses[name] = step(tokens)
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
            model.zero_grad()
        assert abs(losses["plain"] - losses["walked"]) < 1e-3, losses
    ratios = [w / p for w, p in zip(seconds["walked"], seconds["plain"], strict=True)]
    result = {
        "machine": machine(),
        "tokens": args.tokens,
        "plain_seconds": statistics.median(seconds["plain"]),
        "walked_seconds": statistics.median(seconds["walked"]),
        "ratio_of_neighbours": statistics.median(ratios),
        "ratio_of_fastest": min(seconds["walked"]) / min(seconds["plain"]),
        "seconds": seconds,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "seconds"}, indent=1))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
