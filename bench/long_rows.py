"""Rows of 32K to 1M tokens on one GPU: seconds and device peak of a step, beside the stock best.

The stock best is transformers with PEFT, gradient checkpointing, activations offloaded by TRL, Liger's norm, rotary
and GLU, and a checkpointed chunked cross-entropy. One sequence, LoRA r=16 on every linear of the layers, random weights
at a real shape. Peak is `torch.cuda.max_memory_allocated`, weights included.

    python bench/long_rows.py stock --tokens 32768 131072 --out stock.json
    python bench/long_rows.py walk --tokens 131072 --keep attention --out walk.json
    python bench/long_rows.py walk --tokens 393216 --bits 4 --cap 24 --out cap.json
    python bench/long_rows.py sample --tokens 1048576 --bits 4 --cap 24 --out sample.json

`--cap` limits the allocator to so many GB (10^9 bytes) less 0.6 GB for the CUDA context. `--bits 4` packs every linear
of the layers (affine, group 64); embeddings and head stay in bf16. `sample` takes a model of four layers, holds the
weights of the other 28 beside it, and runs the cells of six chunks in each layer (first, last and between; all chunks
write their keys and values): the memory of a step is the same in every layer, and the last chunk needs the most.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import LINEARS, RANK, SHAPES, build, chunked_loss, machine, use_liger, with_checkpointing
from torch import nn

from longtune.engine import Engine, Plan
from longtune.engine.cells import Cells, Graph
from longtune.model.adapters import add_lora
from longtune.model.packed import Format, PackedLinear
from longtune.objective import get
from longtune.tree import Forest, Tree

CONTEXT = 0.6e9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def flops(shape: str, tokens: int, layers: int | None = None) -> float:
    """6 N T + 4.5 x 2 T^2 H L, with N the parameters of the layers' linears and the head."""
    s: dict[str, Any] = SHAPES[shape]
    layers = layers or s["num_hidden_layers"]
    hidden, kv = s["hidden_size"], s["hidden_size"] // s["num_attention_heads"] * s["num_key_value_heads"]
    per_layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * s["intermediate_size"]
    parameters = per_layer * layers + hidden * s["vocab_size"]
    return 6 * parameters * tokens + 4.5 * 2 * tokens**2 * hidden * layers


def stock(shape: str) -> Callable[[torch.Tensor], float]:
    from trl.models.activation_offloading import OffloadActivations

    use_liger()
    model = build(shape, DEVICE)
    wrapped = with_checkpointing(model)

    def step(tokens: torch.Tensor) -> float:
        with OffloadActivations():
            hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        loss = chunked_loss(hidden, tokens, model.lm_head.weight)
        loss.backward()
        wrapped.zero_grad()
        return float(loss.detach())

    return step


def packed(linear: nn.Linear, bits: int, group: int = 64) -> PackedLinear:
    """Random packed weights of a linear's shape and about its spread."""
    rows, columns = linear.weight.shape
    device = linear.weight.device
    words = torch.randint(-(2**31), 2**31 - 1, (rows, columns * bits // 32), dtype=torch.int32, device=device)
    scales = torch.full((rows, columns // group), 0.07 / (2**bits - 1), dtype=torch.bfloat16, device=device)
    biases = torch.full_like(scales, -0.035)
    return PackedLinear(Format("affine", bits, group), columns, words, scales, biases, compute_dtype=torch.bfloat16)


def pack(model: nn.Module, bits: int) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LINEARS:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], packed(module, bits))
    gc.collect()
    torch.cuda.empty_cache()


def adapted(args: argparse.Namespace, **changes: Any) -> nn.Module:
    if args.liger:
        use_liger()
    model = build(args.shape, DEVICE, **changes)
    if args.bits:
        pack(model, args.bits)
    wrapped = add_lora(model, rank=RANK, alpha=32)
    wrapped.train()
    return wrapped


def cap(gigabytes: float | None) -> None:
    if gigabytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((gigabytes * 1e9 - CONTEXT) / total)


def plan_of(args: argparse.Namespace) -> Plan:
    return Plan(
        chunk_tokens=args.chunk,
        layers_per_segment=args.layers_per_segment,
        boundary_store=args.store,
        keep=args.keep,
        keep_layers=args.keep_layers,
        head_chunk=args.head_chunk,
    )


def walked(args: argparse.Namespace) -> Callable[[torch.Tensor], float]:
    wrapped = adapted(args)
    cap(args.cap)
    engine = Engine(wrapped, plan_of(args), attention=args.attention, compile=args.compile)
    objective = get("sft")
    if args.check:
        print(json.dumps(compared(engine, objective, args.check)), flush=True)

    def step(tokens: torch.Tensor) -> float:
        forest = Forest([Tree.sequence(tokens.cpu())])
        long = args.plain_from is not None and forest.size >= args.plain_from
        engine.set_plan(replace(plan_of(args), keep="nothing", keep_layers=None) if long else plan_of(args))
        loss = engine.accumulate(forest, objective, objective.totals(forest))["loss"]
        wrapped.zero_grad()
        return loss

    return step


def compared(engine: Engine, objective: Any, tokens: int) -> dict[str, Any]:
    """Loss and gradients of one row with the layers compiled, beside those without."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    trained = [p for _, p in engine.model.named_parameters() if p.requires_grad]
    for parameter in trained:  # B too, which is zero in a fresh adapter.
        parameter.data.normal_(0, 0.02, generator=generator)
    forest = Forest([Tree.sequence(torch.randint(10, 500, (tokens,)))])
    losses, gradients = [], []
    for engine.compile in (False, True):
        losses.append(engine.accumulate(forest, objective, objective.totals(forest))["loss"])
        gradients.append(torch.cat([p.grad.float().flatten().cpu() for p in trained if p.grad is not None]))
        engine.model.zero_grad()
    plain, compiled = gradients
    apart = float((plain - compiled).norm() / plain.norm())
    return {"checked": tokens, "losses": losses, "gradient_norm": float(plain.norm()), "gradients_apart": apart}


class _Sampled(Cells):
    """Runs the cells of some chunks only; the others write their keys and values."""

    def _some(self, c: int) -> bool:
        last = len(self.chunks) - 1
        return c in {0, last // 4, last // 2, 3 * last // 4, last - 1, last}

    def run(self, layer, c, hidden, **options):
        if self._some(c):
            return super().run(layer, c, hidden, **options)
        self.rebuild_kv(layer, c, hidden)
        return hidden

    def graph(self, layer, c, hidden, kept=None, *, read=True):
        if self._some(c):
            return super().graph(layer, c, hidden, kept, read=read)
        inputs, _ = self._leaves(layer, c, hidden)
        first = next(p for p in self.stack.layers[layer].parameters() if p.requires_grad)
        with torch.enable_grad():
            return Graph(inputs, inputs[0] + 0 * first.sum().to(hidden.dtype))


def sampled(args: argparse.Namespace) -> Callable[[torch.Tensor], float]:
    layers = 4
    wrapped = adapted(args, num_hidden_layers=layers)
    engine = Engine(wrapped, plan_of(args), attention=args.attention, compile=args.compile)
    own = sum(p.numel() * p.element_size() for p in engine.stack.layers[0].parameters())
    own += sum(b.numel() * b.element_size() for b in engine.stack.layers[0].buffers())
    missing = max(0, SHAPES[args.shape]["num_hidden_layers"] - layers)  # pyright: ignore[reportOperatorIssue]
    ballast = torch.empty(max(1, own * missing), dtype=torch.uint8, device=DEVICE)
    cap(args.cap)
    objective = get("sft")

    def step(tokens: torch.Tensor) -> float:
        forest = Forest([Tree.sequence(tokens.cpu())])
        walk = engine.walk(forest, (0, 0), True)
        walk.cells.__class__ = _Sampled
        walk.forward()
        cotangent = objective.known_cotangent(forest, objective.totals(forest))
        assert cotangent is not None and ballast.numel()
        lp = walk.head(cotangent)
        walk.backward()
        return float(-lp.mean())

    return step


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("stock", "walk", "sample"))
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    parser.add_argument("--repeats", type=int, default=1, help="steps of each length; the first also pins memory")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--layers-per-segment", type=int, default=1)
    parser.add_argument("--keep", default="nothing")
    parser.add_argument("--keep-layers", type=int)
    parser.add_argument(
        "--plain-from", type=int, help="rows from so many tokens on keep nothing: host memory is finite"
    )
    parser.add_argument("--store", default="host")
    parser.add_argument("--head-chunk", type=int, default=1024)
    parser.add_argument("--attention")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--cap", type=float, help="GB")
    parser.add_argument("--liger", action="store_true", help="Liger's norm, rotary and GLU in the walk, too")
    parser.add_argument("--compile", action="store_true", help="layers through torch.compile")
    parser.add_argument("--check", type=int, help="first compare compiled layers with plain ones on so many tokens")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.check and not (args.compile and args.way == "walk"):
        parser.error("--check is for a walk with --compile")
    described = {**machine(), "shape": args.shape, "arguments": vars(args)}
    made = {"stock": lambda: stock(args.shape), "walk": lambda: walked(args), "sample": lambda: sampled(args)}
    step = made[args.way]()
    base = torch.cuda.memory_allocated() / 2**30
    table = []
    for n in args.tokens:
        tokens = torch.randint(10, 500, (n,), device=DEVICE)
        for repeat in range(args.repeats):
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.perf_counter()
            entry: dict[str, Any] = {"way": args.way, "tokens": n, "repeat": repeat, "weights_gib": base}
            try:
                entry["loss"] = step(tokens)
                float(torch.zeros(1, device=DEVICE).sum())  # waits for the device
                entry["seconds"] = time.perf_counter() - start
                if args.way != "sample":
                    entry["tflops"] = flops(args.shape, n) / entry["seconds"] / 1e12
            except torch.OutOfMemoryError as error:
                entry["error"] = str(error)[:300]
            entry["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            entry["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            table.append(entry)
            print(json.dumps(entry), flush=True)
            if args.out:
                with open(args.out, "w") as file:
                    json.dump({"machine": described, "rows": table}, file, indent=1)
            with contextlib.suppress(KeyError):
                del entry["loss"]


if __name__ == "__main__":
    main()
