"""Loss heads on a GPU: seconds of forward and backward, extra memory and gradient error, beside the bare products.

The same frozen matrix, hidden states and targets for every way: log-probs (or the loss) and d(hidden). First each way's
gradient is compared with fp32 on a few hundred targets, beside what bf16 autograd over full logits gets there; then it
is timed at full size. `bare` is hidden x W and g x W alone, all logits in memory. Memory is the peak above the
inputs and the returned d(hidden). "issue" is when the host has asked for everything: where that is close to the whole
time, the host is what is measured. Liger and cut-cross-entropy are raced where they are installed.

    python bench/head.py --out head.json
    python bench/head.py --quick --sizes 4096x8192 8192x4096    # our own ways alone; passes x slices of the online head
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import machine

from longtune.head.form import HeadForm
from longtune.head.fused import FusedChunked
from longtune.head.heads import Chunked, Reference
from longtune.head.online import OnlineHead
from longtune.model.packed import Format, PackedLinear

SHAPES = {"llama": (8192, 4096, 128256), "gemma": (8192, 2304, 256000), "small": (512, 256, 4099)}
"""Targets, hidden size, vocabulary."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor]]
"""Hidden [M, H], token [M], cotangent [M] -> log-probs (None where a peer gives only their sum) and d(hidden)."""


@dataclass
class Way:
    run: Run
    truth: torch.Tensor
    """The matrix it computes with, dequantised."""


def contract(head: object) -> Run:
    return lambda hidden, token, cotangent: head.backward(hidden, token, cotangent)[:2]  # pyright: ignore


def ways(weight: torch.Tensor, softcap: float | None, sizes: list[tuple[int, int]]) -> dict[str, Callable[[], Way]]:
    """Ways by name, made when they are run; `sizes` are targets of a pass and columns of a slice to try beside the
    online head's own."""
    form = HeadForm(weight, softcap=softcap)
    V, H = weight.shape
    found: dict[str, Callable[[], Way]] = {
        "online": lambda: Way(contract(OnlineHead(form, None)), weight),
        "online, head_chunk 1024": lambda: Way(contract(OnlineHead(form, 1024)), weight),
        "online, head_chunk 256": lambda: Way(contract(OnlineHead(form, 256)), weight),
        "fused": lambda: Way(contract(FusedChunked(form, None)), weight),
        "chunked 1024": lambda: Way(contract(Chunked(form, 1024)), weight),
    }
    for tokens, columns in sizes:
        found[f"online, {tokens} x {columns}"] = lambda tokens=tokens, columns=columns: Way(
            contract(OnlineHead(form, None, tokens=tokens, columns=columns)), weight
        )
    for bits in (4, 8):
        if H % 64 or weight.device.type != "cuda":
            continue

        def packed(bits: int = bits) -> Way:
            made = random_packed(V, H, bits, weight.device)
            own = HeadForm(made.weight, softcap=softcap, packed=made)
            return Way(contract(OnlineHead(own, None)), made.dequantise(torch.bfloat16))

        found[f"online, {bits}-bit"] = packed
    if importlib.util.find_spec("liger_kernel"):
        found["Liger fused linear CE"] = lambda: Way(liger(weight, softcap), weight)
    if importlib.util.find_spec("cut_cross_entropy"):
        found["cut-cross-entropy"] = lambda: Way(cut(weight, softcap, None), weight)
        found["cut-cross-entropy, filter"] = lambda: Way(cut(weight, softcap, "auto"), weight)
    return found


OURS = ("fused", "online")
"""What the names of our own ways begin with."""


def random_packed(V: int, H: int, bits: int, device: torch.device, group: int = 64) -> PackedLinear:
    format = Format("affine", bits, group)
    words = torch.randint(-(2**31), 2**31, (V, format.words(H)), device=device).to(torch.int32)
    step = 0.12 / 2**bits
    scales = (torch.rand(V, H // group, device=device) + 0.5) * step
    biases = -scales * (2**bits - 1) / 2
    return PackedLinear(
        format, H, words, scales.bfloat16(), biases.bfloat16(), compute_dtype=torch.bfloat16
    ).requires_grad_(False)


def liger(weight: torch.Tensor, softcap: float | None) -> Run:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function

    def run(hidden: torch.Tensor, token: torch.Tensor, cotangent: torch.Tensor) -> tuple[None, torch.Tensor]:
        leaf = hidden.detach().requires_grad_()
        # Arguments in order: bias, class weights, ignored index, z-loss, smoothing, reduction, softcap.
        out = function.apply(leaf, weight, token, None, None, -100, 0.0, 0.0, "sum", softcap)
        (out[0] if isinstance(out, tuple) else out).backward()
        return None, leaf.grad

    return run


def cut(weight: torch.Tensor, softcap: float | None, eps: str | None) -> Run:
    from cut_cross_entropy import linear_cross_entropy

    def run(hidden: torch.Tensor, token: torch.Tensor, cotangent: torch.Tensor) -> tuple[None, torch.Tensor]:
        leaf = hidden.detach().requires_grad_()
        linear_cross_entropy(leaf, weight, token, reduction="sum", softcap=softcap, filter_eps=eps).backward()
        return None, leaf.grad

    return run


def draw(M: int, H: int, V: int, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(M, H, device=device, generator=generator).bfloat16()
    token = torch.randint(V, (M,), device=device, generator=generator)
    # The sum of -lp, as the peers that take no cotangent compute it.
    return hidden, token, -torch.ones(M, device=device)


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float(torch.linalg.norm(ours.double() - truth.double()) / torch.linalg.norm(truth.double()))


def errors(way: Way, softcap: float | None, few: Inputs) -> dict[str, float]:
    """Against fp32: relative error of d(hidden) and largest of a log-prob, of the way and of bf16 autograd over full
    logits."""
    hidden, token, cotangent = few
    truth = Reference(HeadForm(way.truth.float(), softcap=softcap)).backward(hidden.float(), token, cotangent)
    plain = Reference(HeadForm(way.truth, softcap=softcap)).backward(hidden, token, cotangent)
    log_probs, dhidden = way.run(hidden, token, cotangent)
    found = {
        "error": relative(dhidden, truth[1]),
        "bf16_error": relative(plain[1], truth[1]),
        "bf16_log_prob_error": float((plain[0] - truth[0]).abs().max()),
    }
    if log_probs is not None:
        found["log_prob_error"] = float((log_probs - truth[0]).abs().max())
    return found


def timed(run: Callable[[Inputs], object], inputs: list[Inputs], repeats: int) -> dict[str, float]:
    """Median milliseconds by device events, median milliseconds after which the host had issued all of it, and the peak
    of memory above what was there, in GiB."""
    run(inputs[0])
    if inputs[0][0].device.type != "cuda":
        return {"milliseconds": float("nan"), "peak_gib": float("nan")}
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times, issued = [], []
    for index in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        start.record()
        run(inputs[index % len(inputs)])
        end.record()
        issued.append(1000 * (time.perf_counter() - began))
        end.synchronize()
        times.append(start.elapsed_time(end))
    result = inputs[0][0].numel() * inputs[0][0].element_size()
    peak = torch.cuda.max_memory_allocated() - before - result
    return {
        "milliseconds": statistics.median(times),
        "fastest": min(times),
        "issue_milliseconds": statistics.median(issued),
        "peak_gib": peak / 2**30,
    }


def bare(weight: torch.Tensor, M: int) -> Callable[[Inputs], object]:
    scores = torch.empty(M, weight.shape[0], dtype=weight.dtype, device=weight.device)

    def run(given: Inputs) -> object:
        torch.mm(given[0], weight.t(), out=scores)
        return scores @ weight

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama", "gemma"])
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ways", nargs="*", help="names of the ways to run; all by default")
    parser.add_argument("--quick", action="store_true", help="our own ways alone")
    parser.add_argument("--sizes", nargs="*", default=[], metavar="TOKENSxCOLUMNS", help="of the online head, to try")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    for name in args.shapes:
        M, H, V = SHAPES[name]
        weight = (torch.randn(V, H, device=device) * 2 * H**-0.5).bfloat16()
        few = draw(min(M, 512), H, V, device, 1)
        inputs = [draw(M, H, V, device, seed) for seed in (2, 3)]
        floor = timed(bare(weight, M), inputs, args.repeats)
        rows.append({"shape": name, "way": "bare products", **floor, "ratio": 1.0})
        sizes = [(int(a), int(b)) for a, b in (size.split("x") for size in args.sizes)]
        for way_name, make in ways(weight, args.softcap, sizes).items():
            if (args.ways and way_name not in args.ways) or (args.quick and not way_name.startswith(OURS)):
                continue
            entry: dict[str, object] = {"shape": name, "way": way_name}
            way = None
            try:
                way = make()
                entry.update(errors(way, args.softcap, few))
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
                found = timed(lambda given, way=way: way.run(*given), inputs, args.repeats)
                entry.update(found, ratio=found["milliseconds"] / floor["milliseconds"])
            except Exception as fault:  # A peer of another version must not end the race; it is shown.
                entry["failed"] = f"{type(fault).__name__}: {str(fault)[:300]}"
            rows.append(entry)
            print(json.dumps(entry), flush=True)
            if args.out:
                with open(args.out, "w") as file:
                    json.dump({"machine": machine(), "softcap": args.softcap, "rows": rows}, file, indent=1)
    titles = ("ms", "issue", "ratio", "GiB", "error", "bf16", "log-prob", "bf16")
    print("shape  {:>8} {:>7} {:>6} {:>6} {:>9} {:>9} {:>9} {:>9}  way".format(*titles))
    columns = ("milliseconds", "issue_milliseconds", "ratio", "peak_gib")
    columns += ("error", "bf16_error", "log_prob_error", "bf16_log_prob_error")
    for row in rows:
        numbers = [row.get(key, float("nan")) for key in columns]
        cells = "{:>8.2f} {:>7.2f} {:>6.3f} {:>6.3f} {:>9.2e} {:>9.2e} {:>9.1e} {:>9.1e}".format(*numbers)
        print(f"{row['shape']:<6} {cells}  {row['way']} {row.get('failed', '')}")
    for package, name in (("liger_kernel", "Liger"), ("cut_cross_entropy", "cut-cross-entropy")):
        if not importlib.util.find_spec(package):
            print(f"skipped: {name} is not installed")


if __name__ == "__main__":
    main()
