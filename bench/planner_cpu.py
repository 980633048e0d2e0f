"""Predicted beside measured memory on a CPU: the planner's peak and the process's peak resident set.

Every setting runs in a fresh process: the model is built, the plan predicted, a short step makes the optimiser's state,
and then one step of the row is measured (VmHWM, reset before it). Random weights at small shapes, and SmolLM2. The
same row and plan differs by some percent from one process to the next: where the C library leaves holes is chance.

    python bench/planner_cpu.py --out bench/results/planner_cpu.json

With `--sweep`, the planner chooses for budgets from the least that some plan fits to what keeping everything takes, and
the process must stay within each.

    python bench/planner_cpu.py --sweep 20 --out bench/results/sweep_cpu.json
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from common import machine, status

WINDOWED = ["sliding_attention"] * 2 + ["full_attention"]

MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(
        vocab_size=40000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    ),
    "qwen3": dict(
        vocab_size=60000,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=4,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "gemma3_text": dict(
        vocab_size=65536,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=128,
        sliding_window=512,
        layer_types=WINDOWED * 2,
    ),
}

SETTINGS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llama", "float32", 512, dict(keep="everything")),
    ("llama", "float32", 2048, dict(keep="everything")),
    ("llama", "float32", 1024, dict()),
    ("llama", "float32", 2048, dict(chunk_tokens=512)),
    ("llama", "float32", 2048, dict(chunk_tokens=256, keep="attention")),
    ("llama", "float32", 1024, dict(chunk_tokens=256, layers_per_segment=2)),
    ("llama", "float32", 1024, dict(chunk_tokens=256, layers_per_segment=None)),
    ("llama", "float32", 2048, dict(chunk_tokens=512, boundary_store="host")),
    ("qwen3", "float32", 1024, dict(keep="everything")),
    ("qwen3", "float32", 1024, dict(keep="attention")),
    ("qwen3", "float32", 1024, dict(chunk_tokens=256, head_chunk=128)),
    ("gemma3_text", "float32", 1024, dict(keep="everything")),
    ("gemma3_text", "float32", 1024, dict(chunk_tokens=256)),
    ("gemma3_text", "float32", 1024, dict(chunk_tokens=512, keep="attention", boundary_store="host")),
    ("smollm2", "float32", 512, dict(keep="everything")),
    ("smollm2", "float32", 512, dict(chunk_tokens=256)),
    ("llama", "float32", 8192, dict(chunk_tokens=1024, keep="attention")),
    ("llama", "float32", 1024, dict(keep="everything")),
    ("gemma3_text", "float32", 512, dict(chunk_tokens=128, layers_per_segment=3)),
    ("qwen3", "float32", 512, dict(chunk_tokens=256, keep="attention")),
    ("smollm2", "float32", 256, dict()),
    ("llama", "float32", 2048, dict(keep="everything", keep_layers=2)),
    ("qwen3", "float32", 1024, dict(keep="everything", keep_layers=2, keep_below="attention")),
    ("smollm2", "float32", 512, dict(keep="everything", keep_layers=15)),
]


def build(name: str, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from longtune.model.loading import load_model

    if name == "smollm2":
        return load_model(name, dtype=dtype, device="cpu").model
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, max_position_embeddings=16384, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).requires_grad_(False)


SWEPT = [("llama", 2048), ("qwen3", 1536), ("gemma3_text", 1024)]
"""Models and tokens that budgets are tried on, in turn."""


def one(number: int, share: float | None = None) -> None:
    """Predict and measure one setting in this process.

    Args:
        share: let the planner choose for a budget so far between the least and the most; `number` is one of `SWEPT`.
    """
    warnings.simplefilter("ignore")
    import torch

    from longtune.engine import Engine, Plan, devices
    from longtune.engine.budget import Budget
    from longtune.engine.forecast import Row
    from longtune.engine.planner import Planner
    from longtune.model.adapters import add_lora
    from longtune.objective import get

    name, dtype, tokens, keys = (
        SETTINGS[number] if share is None else (SWEPT[number][0], "float32", SWEPT[number][1], {})
    )
    model = add_lora(build(name, dtype), rank=8, alpha=16)
    model.train()
    engine, plan, objective = Engine(model, Plan(**keys)), Plan(**keys), get("sft")
    device = devices.measure(torch.device("cpu"), getattr(torch, dtype))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(row: Row) -> float:
        forest = row.forest()
        start = time.perf_counter()
        engine.accumulate(forest, objective, objective.totals(forest))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    row = Row(tokens, trained=10)
    with Planner(model, device, like=engine) as planner:
        budget = None
        start = time.perf_counter()
        if share is None:
            prediction = planner.predict(plan, row)
        else:
            low = planner.predict(Plan(chunk_tokens=512), row).needed_bytes
            high = planner.predict(Plan(keep="everything"), row).needed_bytes
            budget = int(low * 1.005 * (high / low) ** share)
            chosen = planner.choose(row, Budget(budget, 0, 0))
            if chosen is None:
                print(json.dumps({"model": name, "tokens": tokens, "budget": budget, "fits": False}))
                return
            prediction = chosen
        planning = time.perf_counter() - start
    engine.set_plan(prediction.plan)
    del planner
    gc.collect()
    step(Row(32))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    seconds = step(row)
    measured = int(status("VmHWM") * 1024 * 1024)
    print(
        json.dumps(
            {
                "model": name,
                "dtype": dtype,
                "tokens": tokens,
                "plan": keys if budget is None else prediction.plan.as_dict(),
                "budget": budget,
                "predicted_bytes": prediction.peak_bytes,
                "measured_bytes": measured,
                "error": prediction.peak_bytes / measured - 1,
                "terms": prediction.terms,
                "predicted_seconds": prediction.seconds.total,
                "measured_seconds": seconds,
                "planning_seconds": planning,
            }
        )
    )


def sweep(count: int, out: str | None) -> None:
    rows = []
    for number in range(count):
        share = str((number // len(SWEPT)) / max(1, (count - 1) // len(SWEPT)))
        command = [sys.executable, __file__, "--one", str(number % len(SWEPT)), "--share", share]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        row = rows[-1]
        row["within"] = row.get("measured_bytes", 0) <= row["budget"]
        measured = f"measured {row['measured_bytes'] / 2**20:>6.0f}" if "measured_bytes" in row else "does not fit"
        plan = {k: v for k, v in row.get("plan", {}).items() if k in ("chunk_tokens", "keep", "layers_per_segment")}
        print(
            f"{row['model']:<12} {row['tokens']:>5} budget {row['budget'] / 2**20:>6.0f} MiB, {measured} {plan}",
            flush=True,
        )
    over = sum(not row["within"] for row in rows)
    print(f"{len(rows)} budgets, {sum('plan' in row for row in rows)} said to fit, {over} of them exceeded")
    if out:
        Path(out).write_text(json.dumps({**machine(), "exceeded": over, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of settings")
    parser.add_argument("--sweep", type=int, help="this many budgets instead")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        one(args.one, args.share)
        return
    if args.sweep:
        sweep(args.sweep, args.out)
        return
    rows = []
    for number in args.only or range(len(SETTINGS)):
        command = [sys.executable, __file__, "--one", str(number)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        row = rows[-1]
        print(
            f"{row['model']:<12} {row['dtype']:<9} {row['tokens']:>6} {row['plan']!s:<62} "
            f"predicted {row['predicted_bytes'] / 2**20:>6.0f} MiB, measured {row['measured_bytes'] / 2**20:>6.0f} MiB "
            f"{row['error']:+7.1%}  time {row['predicted_seconds']:.1f} / {row['measured_seconds']:.1f} s",
            flush=True,
        )
    within = sum(abs(row["error"]) <= 0.05 for row in rows)
    lowest = min(row["error"] for row in rows)
    print(f"within 5%: {within} of {len(rows)}; lowest {lowest:+.1%}")
    if args.out:
        result = {**machine(), "within_5_percent": within, "lowest_error": lowest, "rows": rows}
        Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
