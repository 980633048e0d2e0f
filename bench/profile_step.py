"""Where the time of a walked step goes on a GPU: kernels by total time, and how busy the device was.

python bench/profile_step.py --tokens 65536 --layers 4
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from common import RANK, SHAPES, build
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.objective import get
from longtune.tree import Forest, Tree


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--keep", default="attention")
    parser.add_argument("--store", default="host")
    parser.add_argument("--rows", type=int, default=1, help="sequences in the row")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--kernels", type=int, default=40)
    args = parser.parse_args()
    model = add_lora(build(args.shape, "cuda", num_hidden_layers=args.layers), rank=RANK, alpha=32)
    model.train()
    plan = Plan(chunk_tokens=args.chunk, boundary_store=args.store, keep=args.keep)
    engine = Engine(model, plan, compile=args.compile)
    length = args.tokens // args.rows
    forest = Forest([Tree.sequence(torch.randint(10, 500, (length,))) for _ in range(args.rows)])
    objective = get("sft")
    totals = objective.totals(forest)
    for _ in range(2):
        engine.accumulate(forest, objective, totals)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        start = time.perf_counter()
        engine.accumulate(forest, objective, totals)
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    found = [e for e in profiled.key_averages() if e.device_type == DeviceType.CUDA]
    copies = sum(e.self_device_time_total for e in found if "Memcpy" in e.key) / 1e6
    busy = sum(e.self_device_time_total for e in found) / 1e6 - copies
    print(f"wall {seconds:.3f} s, issued in {issued:.3f} s, kernels {busy:.3f} s, copies {copies:.3f} s")
    for event in sorted(found, key=lambda e: -e.self_device_time_total)[: args.kernels]:
        print(f"{event.self_device_time_total / 1e3:10.2f} ms {event.count:6d}  {event.key[:110]}")


if __name__ == "__main__":
    main()
