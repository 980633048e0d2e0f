"""One training step on a packed base beside bf16 and bitsandbytes NF4: peak memory and seconds.

One sequence, LoRA r=16 on every linear of the layers, random weights at a real shape, the same plan for all. Before
that, how fast the dequantising kernel is, and that it gives the reference's bits on this device.

    python bench/packed.py --shape llama-8b --tokens 32768 --out bench/results/h200-packed.json
    python bench/packed.py --only-kernel
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from common import RANK, SHAPES, build, machine, measure
from torch import nn

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.model.packed import Format, PackedEmbedding, PackedLinear, PackedWeight, packed_bytes
from longtune.model.packed.formats import dequantise_reference, float_format
from longtune.model.packed.quantiser import quantise
from longtune.objective import get
from longtune.tree import Forest, Tree

AFFINE = Format("affine", 4, 64)


def pack(model: nn.Module, format: Format, *, outside: bool) -> nn.Module:
    """Every linear of the layers packed in place; embedding and head too for `outside`."""
    for name, module in list(model.named_modules()):
        inside = ".layers." in name
        if not isinstance(module, nn.Linear | nn.Embedding) or not (inside or outside):
            continue
        made = quantise(module.weight, format)
        tensors = (format, module.weight.shape[1], made.weight, made.scales, made.biases)
        kind = PackedEmbedding if isinstance(module, nn.Embedding) else PackedLinear
        model.set_submodule(name, kind(*tensors, compute_dtype=torch.bfloat16))
        module.weight.data = torch.empty(0)
    return model


def nf4(model: nn.Module) -> nn.Module:
    """Every linear of the layers as bitsandbytes' NF4, its scales quantised too."""
    import bitsandbytes

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or ".layers." not in name:
            continue
        made = bitsandbytes.nn.Linear4bit(
            module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        weight = module.weight.data
        made.weight = bitsandbytes.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
        model.set_submodule(name, made.to(weight.device))
        module.weight.data = torch.empty(0)
    return model


def dequantising(device: str, rows: int, columns: int) -> list[dict[str, Any]]:
    """Seconds and written bytes per second of one dequantised weight, and whether its bits are the reference's."""
    formats = [
        *(Format("affine", bits, 64) for bits in (2, 3, 4, 6, 8)),
        *map(float_format, ("mxfp4", "mxfp8", "nvfp4")),
    ]
    weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    found = []
    for format in formats:
        made = quantise(weight, format)
        packed = PackedWeight(format, columns, made.weight, made.scales, made.biases, compute_dtype=torch.bfloat16)
        ours = packed.dequantise()
        theirs = torch.empty_like(ours)
        dequantise_reference(format, packed.weight, packed.scales, packed.biases, None, theirs)
        seconds, issue = timed(lambda packed=packed, out=ours: packed.dequantise(out=out), device)
        found.append(
            {
                "format": str(format),
                "equal": bool(torch.equal(ours, theirs)),
                "seconds": seconds,
                "issue_seconds": issue,
                "written_tb_per_s": ours.numel() * 2 / seconds / 1e12,
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def timed(work: Callable[[], object], device: str, repeats: int = 20) -> tuple[float, float]:
    """Seconds of one call: of the device alone (calls replayed as one graph), and until the host has issued it."""
    for _ in range(3):
        work()
    if device != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start, 0.0
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    issue = (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats, issue


def raced(model: nn.Module, plan: Plan, tokens: torch.Tensor, cuda: bool, repeats: int) -> dict[str, float]:
    """Bytes of the weights, and `common.measure` of a training step."""
    weights = packed_bytes(model) / 2**30
    wrapped = add_lora(model, rank=RANK, alpha=32)  # pyright: ignore[reportArgumentType]
    wrapped.train()
    engine = Engine(wrapped, plan)
    objective = get("sft")
    forest = Forest([Tree.sequence(tokens)])

    def step() -> float:
        loss = engine.accumulate(forest, objective, objective.totals(forest))["loss"]
        wrapped.zero_grad()
        return loss

    try:
        return {"weights_gib": weights, **measure(step, cuda, repeats)}
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--keep", default="nothing")
    parser.add_argument("--store", default="host")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only-kernel", action="store_true", help="dequantising alone, no steps")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(chunk_tokens=args.chunk, boundary_store=args.store if device == "cuda" else "device", keep=args.keep)
    shape = SHAPES[args.shape]
    result: dict[str, Any] = {"machine": {**machine(), "shape": args.shape}, "tokens": args.tokens, "rows": []}
    result["dequantising"] = dequantising(device, shape["intermediate_size"], shape["hidden_size"])
    if args.only_kernel:
        return
    ways: dict[str, Callable[[], nn.Module]] = {
        "bf16": lambda: build(args.shape, device),
        "affine 4-bit g64, layers": lambda: pack(build(args.shape, device), AFFINE, outside=False),
        "affine 4-bit g64, all": lambda: pack(build(args.shape, device), AFFINE, outside=True),
    }
    if importlib.util.find_spec("bitsandbytes") is not None:
        ways["bitsandbytes NF4, layers"] = lambda: nf4(build(args.shape, device))
    tokens = torch.randint(10, 500, (args.tokens,), generator=torch.Generator().manual_seed(0))
    for way, make in ways.items():
        entry = {"way": way, **raced(make(), plan, tokens, device == "cuda", args.repeats)}
        result["rows"].append(entry)
        print(json.dumps(entry), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)
        gc.collect()
    plain = result["rows"][0]["seconds"]
    print(f"{'seconds':>8} {'x bf16':>7} {'GiB':>6} {'weights':>8}  way")
    for row in result["rows"]:
        shown = (
            f"{row['seconds']:>8.2f} {row['seconds'] / plain:>7.3f} {row['peak_gib']:>6.1f} {row['weights_gib']:>8.2f}"
        )
        print(f"{shown}  {row['way']}")


if __name__ == "__main__":
    main()
