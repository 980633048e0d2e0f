"""Attention on a GPU: milliseconds and TFLOP/s of the last chunk of a row, forward and backward, way by way.

Long rows (a chunk of 8,192 tokens against paths of 8K to 128K), a sliding window, a softcap, and packed short rows
(single sequences, and pairs that share a prompt). Each way is first compared with explicit fp64 attention on a short
row of the same kind. TFLOP/s count the pairs of query and key that the mask allows: 4 D H each forward, 10 D H
backward. "One call" is what a kernel of torch reaches at best on such a shape: the chunk's queries and all keys,
without a mask where the chunk has a past (torch's cuDNN has no causal mask of a rectangle).

    python bench/attention.py --out attention.json
    python bench/attention.py --dtype float32   # what fp32 models get
    python bench/attention.py --ways triton     # one way alone
    python bench/attention.py --tune            # tile sizes of the Triton kernels
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from common import machine, preference_tree

from longtune.attention.kernels import CudaEfficient, CudaFlash, Cudnn, Kernel, Reference
from longtune.attention.merge import merge, merge_fused
from longtune.attention.path import PathAttention, Score
from longtune.attention.select import fuses_merging
from longtune.attention.store import KVStore
from longtune.attention.triton_path import Blocks, Sizes, TritonPath
from longtune.attention.varlen import VarlenFlash
from longtune.tree import Chunk, Forest, Tree

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Shape = tuple[int, int, int, int]
"""Query heads, key heads, key width, value width."""
LLAMA: Shape = (32, 8, 128, 128)


@dataclass(frozen=True)
class Case:
    """A kind of work.

    Attributes:
        row: the row whose last chunk is timed. small: a short row of the same kind, for the check.
        ways: names of the ways that can do it, the slowest left out where it would take seconds.
    """

    name: str
    row: Callable[[], Forest]
    small: Callable[[], Forest]
    chunk: int
    score: Score
    ways: tuple[str, ...]
    shape: Shape = LLAMA


BLOCK_KEYS = 8192
"""Keys of a block in the backward; four times as many at most in the forward."""


def in_blocks(kernel: Callable[[], Kernel]) -> Callable[[int], PathAttention]:
    """Blocks of so many keys of a kernel, merged as on this machine."""

    def make(keys: int) -> PathAttention:
        fused = torch.cuda.is_available() and fuses_merging(torch.device("cuda"))
        return PathAttention(kernel(), Reference(), keys, merge=merge_fused if fused else merge)

    return make


WAYS: dict[str, Callable[[int], PathAttention]] = {
    "cudnn blocks": in_blocks(Cudnn),
    "efficient blocks": in_blocks(CudaEfficient),
    "flash blocks": in_blocks(CudaFlash),
    "flash varlen": lambda keys: PathAttention(CudaFlash(), Reference(), keys, [VarlenFlash()]),
    "triton": lambda keys: PathAttention(Reference(), Reference(), keys, [TritonPath(always=True)]),
    "reference": lambda keys: PathAttention(Reference(), Reference(), keys),
}


ONE_CALL: dict[str, Callable[[], Kernel]] = {"cudnn, one call": Cudnn, "flash, one call": CudaFlash}


def sequence(tokens: int) -> Tree:
    return Tree.sequence(torch.zeros(tokens, dtype=torch.int64))


def long(tokens: int) -> Callable[[], Forest]:
    return lambda: Forest([sequence(tokens)])


def short_rows(total: int, shortest: int, longest: int) -> Callable[[], Forest]:
    def make() -> Forest:
        draw = random.Random(0)
        lengths: list[int] = []
        while sum(lengths) < total:
            lengths.append(min(draw.randint(shortest, longest), total - sum(lengths)))
        return Forest([sequence(n) for n in lengths])

    return make


def pairs(count: int, prompt: int, answer: int) -> Callable[[], Forest]:
    return lambda: Forest([preference_tree(prompt, answer, 100, shared=True) for _ in range(count)])


def cases() -> list[Case]:
    scale = LLAMA[2] ** -0.5
    plain, window, capped = Score(scale), Score(scale, window=4096), Score(scale, 50.0)
    paths = (*ONE_CALL, "cudnn blocks", "flash blocks", "triton")
    masked = ("flash varlen", "triton", "cudnn blocks")
    spans = ("flash varlen", "triton", "flash blocks")
    one = long(1536)
    gemma = Score(0.0625, 50.0, 4096)
    return [
        Case("path 8K", long(8192), one, 8192, plain, (*paths, "reference")),
        Case("path 32K", long(32768), one, 8192, plain, paths),
        Case("path 128K", long(131072), one, 8192, plain, paths),
        Case("window 4096 of 32K", long(32768), one, 8192, window, masked),
        Case("softcap, path 8K", long(8192), one, 8192, capped, ("triton", "reference")),
        Case("softcap, path 32K", long(32768), one, 8192, capped, ("triton",)),
        Case("softcap, window, width 256", long(32768), one, 8192, gemma, ("triton",), (16, 8, 256, 256)),
        Case("packed 100-2,000", short_rows(16384, 100, 2000), short_rows(1200, 30, 200), 16384, plain, spans),
        Case("pairs 400 + 2 x 150", pairs(23, 400, 150), pairs(3, 200, 90), 16384, plain, spans),
    ]


class Work:
    """One chunk ready to run: its store is full."""

    def __init__(self, row: Forest, chunk_tokens: int, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0):
        self.row, self.shape = row, shape
        self.chunks = row.chunks(chunk_tokens)
        heads, key_heads, width, value_width = shape
        generator = torch.Generator(device).manual_seed(seed)

        def make(heads: int, tokens: int, width: int) -> torch.Tensor:
            # Token-major memory behind a head-major view, as models hand it over.
            x = torch.randn(1, tokens, heads, width, device=device, generator=generator)
            return x.to(dtype).transpose(1, 2)

        self.k, self.v = make(key_heads, row.size, width), make(key_heads, row.size, value_width)
        self.q, self.dout = make(heads, row.size, width), make(heads, row.size, value_width)
        self.store = KVStore(row.size)
        for chunk in self.chunks:
            own = slice(chunk.start, chunk.end)
            self.store.write(chunk, self.k[:, :, own], self.v[:, :, own])
        self.store.open_gradients()

    def of(self, x: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return x[:, :, chunk.start : chunk.end]


def allowed(row: Forest, window: int | None) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Per span: first column, last column and the ranges before it; for counting and for the explicit mask."""
    for span in row.chunks(None)[0].spans:
        yield span.start, span.end, list(span.past)


def pairs_seen(chunk: Chunk, window: int | None) -> int:
    """Pairs of query and key that the mask allows."""
    total = 0
    for span in chunk.spans:
        first, last = span.position + 1, span.position + span.end - span.start
        if window is None or last <= window:
            total += (first + last) * (last - first + 1) // 2
        else:
            grows = max(0, window - first + 1)
            total += (first + first + grows - 1) * grows // 2 + (last - first + 1 - grows) * window
    return total


def explicit(work: Work, score: Score) -> tuple[torch.Tensor, ...]:
    """Output and dQ, dK, dV of a whole row in fp64."""
    T, device = work.row.size, work.q.device
    mask = torch.zeros(T, T, dtype=torch.bool, device=device)
    for start, end, past in allowed(work.row, score.window):
        path = torch.cat([torch.arange(a, b) for a, b in [*past, (start, end)]])
        position = torch.arange(path.numel())
        own = position[-(end - start) :]
        distance = own[:, None] - position[None]
        seen = (distance >= 0) & (distance < (score.window or path.numel()))
        mask[torch.arange(start, end)[:, None], path[None]] = seen.to(device)
    leaves = [x.double().detach().requires_grad_() for x in (work.q, work.k, work.v)]
    q, k, v = leaves
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * score.scale
    if score.softcap:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    out = torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ v.repeat_interleave(groups, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, work.dout.double())


def error(case: Case, attention: PathAttention, device: str, dtype: torch.dtype, chunk_tokens: int = 512) -> float:
    """Largest relative error of output, dQ, dK and dV on the short row."""
    heads, key_heads, width, value_width = case.shape
    shape = (max(heads // key_heads * 2, 2), 2, width, value_width)
    work = Work(case.small(), chunk_tokens, shape, dtype, device, seed=1)
    score = case.score
    if score.window is not None:
        score = Score(score.scale, score.softcap, 272)
    kept = [attention.forward(work.of(work.q, c), work.store, c, score) for c in work.chunks]
    dq = []
    for chunk, (out, lse) in reversed(list(zip(work.chunks, kept, strict=True))):
        dout, q = work.of(work.dout, chunk), work.of(work.q, chunk)
        dq.append(attention.backward(dout, q, out, lse, work.store, chunk, score))
    dk, dv = (x.transpose(1, 2) for x in work.store.accumulators)
    found = (torch.cat([o for o, _ in kept], 2), torch.cat(dq[::-1], 2), dk, dv)
    truth = explicit(work, score)
    worst = [float(torch.linalg.norm(o.double() - t) / torch.linalg.norm(t)) for o, t in zip(found, truth, strict=True)]
    return max(worst) if all(math.isfinite(x) for x in worst) else math.inf


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def timed(case: Case, attention: PathAttention, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    work = Work(case.row(), case.chunk, case.shape, dtype, "cuda")
    chunk = work.chunks[-1]
    q, dout = work.of(work.q, chunk), work.of(work.dout, chunk)
    out, lse = attention.forward(q, work.store, chunk, case.score)
    return measured(
        lambda: attention.forward(q, work.store, chunk, case.score),
        lambda: attention.backward(dout, q, out, lse, work.store, chunk, case.score),
        4 * case.shape[2] * case.shape[0] * pairs_seen(chunk, case.score.window),
        repeats,
    )


def timed_whole(case: Case, kernel: Kernel, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    """One call of a kernel over the chunk's queries and all keys; causal where the chunk is the row."""
    work = Work(case.row(), case.chunk, case.shape, dtype, "cuda")
    chunk, k, v, scale = work.chunks[-1], work.k, work.v, case.score.scale
    causal = chunk.size == work.row.size
    q, dout = work.of(work.q, chunk), work.of(work.dout, chunk)
    out, lse = kernel.forward(q, k, v, scale=scale, causal=causal)
    pairs = pairs_seen(chunk, None) if causal else q.shape[2] * k.shape[2]
    return measured(
        lambda: kernel.forward(q, k, v, scale=scale, causal=causal),
        lambda: kernel.backward(dout, q, k, v, out, lse, scale=scale, causal=causal),
        4 * case.shape[2] * case.shape[0] * pairs,
        repeats,
    )


def measured(
    run_forward: Callable[[], object], run_backward: Callable[[], object], operations: float, repeats: int
) -> dict[str, float]:
    """Times, rates and extra memory of a forward of so many operations, and of its backward."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward, backward = milliseconds(run_forward, repeats), milliseconds(run_backward, repeats)
    work_forward = operations / 1e9
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": work_forward / forward,
        "backward_tflops": 2.5 * work_forward / backward,
        "extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
    }


def ways_of(case: Case, dtype: torch.dtype) -> list[str]:
    """In fp32 torch's flash and cuDNN are out, and paths of 128K take seconds."""
    if dtype != torch.float32:
        return list(case.ways)
    blocks = [] if case.score.softcap or case.score.window else ["efficient blocks"]
    return [] if "128K" in case.name else [*blocks, "triton", "reference"]


def race(
    repeats: int,
    only: list[str] | None,
    ways: list[str] | None,
    dtype: torch.dtype,
    block_keys: int,
    save: Callable[[list[dict[str, object]]], None],
) -> None:
    rows: list[dict[str, object]] = []
    for case in cases():
        if only and not any(word in case.name for word in only):
            continue
        for way in ways_of(case, dtype):
            if ways and way not in ways:
                continue
            entry: dict[str, object] = {"case": case.name, "way": way}
            try:
                cuda = torch.cuda.is_available()
                if way in WAYS:
                    attention = WAYS[way](block_keys)
                    entry["error"] = error(case, attention, "cuda" if cuda else "cpu", dtype)
                    if cuda:
                        entry.update(timed(case, attention, repeats, dtype))
                elif cuda:
                    entry.update(timed_whole(case, ONE_CALL[way](), repeats, dtype))
            except Exception as fault:  # One way that fails must not end the race; it is shown.
                entry["failed"] = f"{type(fault).__name__}: {str(fault)[:300]}"
            rows.append(entry)
            print(json.dumps(entry), flush=True)
            save(rows)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    print(f"{'case':<28}{'way':<17}{'fwd ms':>8} {'TF/s':>5} {'bwd ms':>8} {'TF/s':>5} {'GiB':>6} {'error':>9}")
    keys = ("forward_ms", "forward_tflops", "backward_ms", "backward_tflops", "extra_gib", "error")
    for row in rows:
        cells = "{:>8.2f} {:>5.0f} {:>8.2f} {:>5.0f} {:>6.2f} {:>9.1e}".format(*(row.get(k, math.nan) for k in keys))
        print(f"{row['case']:<28}{row['way']:<17}{cells} {row.get('failed', '')}")


CANDIDATES = {
    128: {
        "forward": [Blocks(128, 64, 8, 3), Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 3)],
        "dq": [Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3)],
        "dkv": [Blocks(64, 128, 8, 2), Blocks(32, 128, 8, 3), Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 3)],
    },
    256: {
        "forward": [Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3)],
        "dq": [Blocks(64, 32, 4, 2), Blocks(64, 64, 8, 2), Blocks(128, 32, 8, 1), Blocks(64, 32, 8, 2)],
        "dkv": [Blocks(32, 64, 8, 2), Blocks(16, 64, 8, 2), Blocks(32, 64, 8, 1)],
    },
}
"""Per head width and kernel; the first ones are tried with the other kernels' first ones."""


def tune(names: list[str], repeats: int, save: Callable[[list[dict[str, object]]], None]) -> None:
    """Each kernel's candidates while the other two keep their first ones."""
    rows: list[dict[str, object]] = []
    for case in cases():
        if case.name not in names:
            continue
        candidates = CANDIDATES[case.shape[2]]
        first = {kernel: tried[0] for kernel, tried in candidates.items()}
        for kernel, tried in candidates.items():
            for blocks in tried if kernel == "forward" else tried[1:]:
                attention = PathAttention(
                    Reference(), Reference(), paths=[TritonPath(always=True, forced=Sizes(**{**first, kernel: blocks}))]
                )
                entry: dict[str, object] = {"case": case.name, "kernel": kernel, "blocks": str(blocks)}
                try:
                    entry.update(timed(case, attention, repeats, torch.bfloat16))
                except Exception as fault:  # Too much shared memory, say: not a candidate.
                    entry["failed"] = f"{type(fault).__name__}: {str(fault)[:200]}"
                rows.append(entry)
                print(json.dumps(entry), flush=True)
                save(rows)
    for row in rows:
        times = "{:>8.2f} {:>8.2f}".format(*(row.get(k, math.nan) for k in ("forward_ms", "backward_ms")))
        print(f"{row['case']:<28}{row['kernel']:<8} {times}  {row['blocks']} {row.get('failed', '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="words of the names of cases")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, *ONE_CALL], help="all by default")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--block-keys", type=int, default=BLOCK_KEYS, help="of a block in the backward")
    parser.add_argument("--tune", nargs="*", metavar="CASE", help="try tile sizes of the Triton kernels")
    parser.add_argument("--out")
    args = parser.parse_args()

    def save(rows: list[dict[str, object]]) -> None:
        if args.out:
            with open(args.out, "w") as file:
                json.dump({"machine": machine(), "rows": rows}, file, indent=1)

    if args.tune is not None:
        usual = ["path 32K", "window 4096 of 32K", "softcap, window, width 256", "pairs 400 + 2 x 150"]
        tune(args.tune or usual, args.repeats, save)
    else:
        race(args.repeats, args.only, args.ways, DTYPES[args.dtype], args.block_keys, save)


if __name__ == "__main__":
    main()
