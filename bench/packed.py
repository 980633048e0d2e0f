"""One training step on a packed base beside bf16 and bitsandbytes NF4: peak memory and seconds.

One sequence, LoRA r=16 on every linear of the layers, random weights at a real shape, the same plan for all. With the
affine ways, how fast the dequantising kernel is, and that it gives the reference's bits on this device. Quantising is
not what is measured: the first layer is quantised, and all others are copies of it.

    python bench/packed.py --shape llama-8b --tokens 32768 --keep attention --out bench/results/h200-packed.json
    python bench/packed.py --ways nf4 --tokens 32768 --keep attention
    python bench/packed.py --only-kernel
"""

from __future__ import annotations

import argparse
import copy
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
WAYS = {
    "bf16": "bf16",
    "affine": "affine 4-bit g64, layers",
    "affine-all": "affine 4-bit g64, all",
    "nf4": "bitsandbytes NF4, layers",
}


def pack(model: nn.Module, format: Format, *, outside: bool) -> nn.Module:
    """Every linear of the layers packed in place; embedding and head too for `outside`."""

    def packed(module: Any) -> nn.Module:
        made = quantise(module.weight, format)
        tensors = (format, module.weight.shape[1], made.weight, made.scales, made.biases)
        kind = PackedEmbedding if isinstance(module, nn.Embedding) else PackedLinear
        return kind(*tensors, compute_dtype=torch.bfloat16)

    if outside:
        _exchange(model, packed, lambda name: ".layers." not in name)
    return _alike(model, packed)


def nf4(model: nn.Module) -> nn.Module:
    """Every linear of the layers as bitsandbytes' NF4, its scales quantised too."""
    import bitsandbytes

    def packed(module: Any) -> nn.Module:
        sizes = module.in_features, module.out_features
        made = bitsandbytes.nn.Linear4bit(
            *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
        )
        weight = module.weight.data
        made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to(weight.device)
        made.support_avx512bf16_for_cpu = False
        return made

    return _alike(model, packed)


def _exchange(model: nn.Module, made: Callable[[Any], nn.Module], chosen: Callable[[str], bool]) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.Embedding) and chosen(name):
            model.set_submodule(name, made(module))
            module.weight.data = torch.empty(0)


def _alike(model: Any, made: Callable[[Any], nn.Module]) -> nn.Module:
    """The linears of the first layer exchanged, and all other layers by copies of it."""
    layers = model.model.layers
    for number in range(1, len(layers)):
        layers[number] = nn.Identity()  # Its memory first.
    _exchange(layers[0], made, lambda name: True)
    for number in range(1, len(layers)):
        layers[number] = copy.deepcopy(layers[0])
        layers[number].self_attn.layer_idx = number
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
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all that can be had")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(chunk_tokens=args.chunk, boundary_store=args.store if device == "cuda" else "device", keep=args.keep)
    shape = SHAPES[args.shape]
    result: dict[str, Any] = {"machine": {**machine(), "shape": args.shape}, "tokens": args.tokens, "rows": []}
    there = importlib.util.find_spec("bitsandbytes") is not None
    chosen = args.ways or [way for way in WAYS if there or way != "nf4"]
    if "nf4" in chosen and not there:
        parser.error("nf4 needs the package bitsandbytes")
    if args.only_kernel or {"affine", "affine-all"} & set(chosen):
        result["dequantising"] = dequantising(device, shape["intermediate_size"], shape["hidden_size"])
    if args.only_kernel:
        return
    made: dict[str, Callable[[], nn.Module]] = {
        "bf16": lambda: build(args.shape, device),
        "affine": lambda: pack(build(args.shape, device), AFFINE, outside=False),
        "affine-all": lambda: pack(build(args.shape, device), AFFINE, outside=True),
        "nf4": lambda: nf4(build(args.shape, device)),
    }
    tokens = torch.randint(10, 500, (args.tokens,), generator=torch.Generator().manual_seed(0))
    for way in chosen:
        start = time.perf_counter()
        model = made[way]()
        print(f"{way}: made in {time.perf_counter() - start:.1f} s", flush=True)
        entry = {"way": WAYS[way], **raced(model, plan, tokens, device == "cuda", args.repeats)}
        del model
        result["rows"].append(entry)
        print(json.dumps(entry), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)
        gc.collect()
    plain = next((row["seconds"] for row in result["rows"] if row["way"] == WAYS["bf16"]), float("nan"))
    print(f"{'seconds':>8} {'x bf16':>7} {'GiB':>6} {'weights':>8}  way")
    for row in result["rows"]:
        ratio, peak, weights = row["seconds"] / plain, row["peak_gib"], row["weights_gib"]
        print(f"{row['seconds']:>8.2f} {ratio:>7.3f} {peak:>6.1f} {weights:>8.2f}  {row['way']}")


if __name__ == "__main__":
    main()
