"""One preference pair on a CPU: its prompt computed once (`tree`) beside two whole sequences (`off`).

SmolLM2-135M in fp32, LoRA r=8 on every linear of the layers, one pair in a step. Each way runs in fresh processes;
memory is the peak resident set during the steps, less the resident set with the model and adapter loaded.

    python bench/pairs_cpu.py --out results.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from common import compared, machine, preference_tree, race, report

WAYS = ("tree", "off")


def make(args: argparse.Namespace) -> tuple[Callable[[], float], object]:
    from longtune.engine import Engine, Plan
    from longtune.model.adapters import add_lora
    from longtune.model.loading import load_model
    from longtune.objective import get
    from longtune.tree import Forest

    model = add_lora(load_model("smollm2", dtype="float32", device="cpu").model, rank=8, alpha=16)
    model.train()
    engine = Engine(model, Plan(chunk_tokens=args.chunk, head_chunk=args.head_chunk, keep=args.keep))
    objective = get(args.method)
    tree = preference_tree(args.prompt, args.answer, 40000, shared=args.way == "tree")
    forest = Forest([tree], prompt_targets=objective.uses_prompt_targets)

    def step() -> float:
        loss = engine.accumulate(forest, objective, objective.totals(forest))["loss"]
        model.zero_grad()
        return loss

    return step, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("orpo", "dpo", "simpo"), default="orpo", help="dpo: reference cached")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk; the whole row by default")
    parser.add_argument("--head-chunk", type=int, default=128)
    parser.add_argument("--keep", choices=("nothing", "attention", "everything"), default="nothing")
    parser.add_argument("--repeats", type=int, default=3, help="steps in each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each way, taken in turn")
    parser.add_argument("--out")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        report(args.way, lambda: make(args), args.repeats)
        return
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "way")}
    passed = [f"--{k.replace('_', '-')}={v}" for k, v in settings.items() if v is not None and k != "rounds"]
    found = race(__file__, WAYS, args.rounds, passed)
    result = {**machine(), "settings": settings, **compared(found, "tree", "off")}
    print(json.dumps(result, indent=1))
    print(f"{'way':>6} {'tokens':>8} {'seconds':>8} {'MiB above model':>16}")
    tokens = {"tree": args.prompt + 2 * args.answer, "off": 2 * (args.prompt + args.answer)}
    for way in WAYS:
        print(f"{way:>6} {tokens[way]:>8,} {result['seconds'][way]:>8.2f} {result['mib_above_model'][way]:>16.0f}")
    if args.out:
        Path(args.out).write_text(json.dumps({**result, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
