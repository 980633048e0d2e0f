"""Memory above the loaded model and seconds of a step on a CPU: longtune beside transformers + PEFT with checkpointing.

SmolLM2-135M in fp32, one row of T tokens, LoRA r=8 on every linear of the layers. Each way runs in a fresh process;
memory is the peak resident set during the steps, less the resident set with the model and adapter loaded.

    python bench/cpu_memory.py --tokens 4096 --out results.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

WAYS = ("transformers", "longtune")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def status(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def transformers_step(tokens: int) -> tuple[Callable[[], float], object]:
    import torch
    from peft import LoraConfig, get_peft_model

    from longtune.model.loading import load_model

    model = load_model("smollm2", dtype="float32", device="cpu").model
    wrapped = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped.train()
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


def child(way: str, tokens: int, chunk: int, keep: str, repeats: int) -> None:
    import gc
    import warnings

    warnings.simplefilter("ignore")
    step, _model = transformers_step(tokens) if way == "transformers" else longtune_step(tokens, chunk, keep)
    gc.collect()
    loaded = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = []
    loss = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"way": way, "loss": loss, "seconds": seconds, "mib": status("VmHWM") - loaded}))


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
    if args.way:
        child(args.way, args.tokens, args.chunk, args.keep, args.repeats)
        return
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--tokens", str(args.tokens), "--chunk", str(args.chunk)]
            command += ["--keep", args.keep, "--repeats", str(args.repeats)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(output.splitlines()[-1]))
            print(found[way][-1], flush=True)
    mib = {way: max(run["mib"] for run in runs) for way, runs in found.items()}
    seconds = {way: min(s for run in runs for s in run["seconds"]) for way, runs in found.items()}
    import torch
    import transformers

    result = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "settings": {k: getattr(args, k) for k in ("tokens", "chunk", "keep", "repeats", "rounds")},
        "mib_above_model": mib,
        "seconds": seconds,
        "memory_ratio": mib["longtune"] / mib["transformers"],
        "time_ratio": seconds["longtune"] / seconds["transformers"],
        "runs": found,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
