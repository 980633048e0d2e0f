"""Where the time of a walked step goes on a GPU: kernels by total time, copies behind them, and when nothing ran.

Intervals are unions: two kernels at once count once. "Hidden" is the part of the copies during which a kernel ran.

    python bench/profile_step.py --tokens 65536 --layers 4 --chunk 16384 --compile
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Iterable

import torch
from common import RANK, SHAPES, build, use_liger
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.objective import get
from longtune.tree import Forest, Tree

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def common_part(some: list[Interval], others: list[Interval]) -> float:
    """Length of what two unions have in common."""
    return length(some) + length(others) - length(union([*some, *others]))


def timeline(events: list[tuple[str, float, float]], gaps: int) -> None:
    """Prints how the device was used, from (name, start, end) in seconds."""
    copies = union((s, e) for name, s, e in events if "Memcpy" in name and "DtoD" not in name)
    kernels = union((s, e) for name, s, e in events if "Memcpy" not in name or "DtoD" in name)
    span = max(e for _, e in kernels) - min(s for s, _ in kernels)
    hidden = common_part(copies, kernels) / max(length(copies), 1e-12)
    print(
        f"device: {span:.3f} s from first to last kernel, kernels {length(kernels):.3f} s"
        f" ({length(kernels) / span:.1%}), copies {length(copies):.3f} s, {hidden:.1%} of them hidden behind kernels"
    )
    starts = {s: name for name, s, _ in events if "Memcpy" not in name or "DtoD" in name}
    ends = {e: name for name, _, e in events if "Memcpy" not in name or "DtoD" in name}
    idle = [(b[0] - a[1], a[1], b[0]) for a, b in itertools.pairwise(kernels)]
    for low, high in ((0, 1e-5), (1e-5, 1e-4), (1e-4, 1e-3), (1e-3, 1e9)):
        some = [g for g, _, _ in idle if low <= g < high]
        print(f"  idle in gaps of {low * 1e6:.0f} us and more: {sum(some) * 1e3:8.2f} ms in {len(some)}")
    around: Counter[tuple[str, str]] = Counter()
    for gap, end, start in idle:
        around[ends[end][:50], starts[start][:50]] += gap  # pyright: ignore[reportArgumentType]
    for (before, after), total in around.most_common(gaps):
        print(f"  {total * 1e3:8.2f} ms  after {before:<50}  before {after}")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=8192, help="0: the whole row")
    parser.add_argument("--keep", default="attention")
    parser.add_argument("--store", default="host")
    parser.add_argument("--rows", type=int, default=1, help="sequences in the row")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--liger", action="store_true", help="Liger's norm, rotary and GLU")
    parser.add_argument("--kernels", type=int, default=40)
    parser.add_argument("--gaps", type=int, default=12)
    args = parser.parse_args()
    if args.liger:
        use_liger()
    model = add_lora(build(args.shape, "cuda", num_hidden_layers=args.layers), rank=RANK, alpha=32)
    model.train()
    plan = Plan(chunk_tokens=args.chunk or None, boundary_store=args.store, keep=args.keep)
    engine = Engine(model, plan, compile=args.compile)
    size = args.tokens // args.rows
    forest = Forest([Tree.sequence(torch.randint(10, 500, (size,))) for _ in range(args.rows)])
    objective = get("sft")
    totals = objective.totals(forest)
    seconds = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.accumulate(forest, objective, totals)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"one step without the profiler {seconds:.3f} s, peak {peak:.1f} GiB")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        start = time.perf_counter()
        engine.accumulate(forest, objective, totals)
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    print(f"with it {seconds:.3f} s, issued in {issued:.3f} s")
    results = profiled.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    raw = [e for e in results.events() if e.device_type() == DeviceType.CUDA and e.duration_ns() > 0]
    raw = [e for e in raw if "gpu_user_annotation" not in str(getattr(e, "activity_type", str)())]
    timeline([(e.name(), e.start_ns() / 1e9, (e.start_ns() + e.duration_ns()) / 1e9) for e in raw], args.gaps)
    found = [e for e in profiled.key_averages() if e.device_type == DeviceType.CUDA]
    for event in sorted(found, key=lambda e: -e.self_device_time_total)[: args.kernels]:
        print(f"{event.self_device_time_total / 1e3:10.2f} ms {event.count:6d}  {event.key[:110]}")


if __name__ == "__main__":
    main()
