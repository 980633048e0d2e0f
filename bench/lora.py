"""What LoRA adds to a linear on a GPU, product by product: the library beside Triton, at the shapes of a layer.

A rank-16 adapter turns one product of N tokens into a large one and five that only pass over memory: low = x A^T,
y += s low B^T, and backward dlow = s dy B, dx += dlow A, dA = dlow^T x, dB = s dy^T low. Milliseconds of each, and what
share of the card's memory rate it reaches (bytes that must be read and written once). Each Triton kernel is compared
with fp32 before it is timed; the fastest of a few tile sizes counts.

    python bench/lora.py --tokens 16384 --out lora.json
    TRITON_INTERPRET=1 python bench/lora.py --tokens 96 --check        # without a GPU: numbers alone, small shapes
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from common import RANK, machine

LINEARS = {"q, o": (4096, 4096, 2), "k, v": (4096, 1024, 2), "gate, up": (4096, 14336, 2), "down": (14336, 4096, 1)}
"""(in, out, how many in a layer) of the Llama-3.1-8B shape."""
SMALL = {"square": (80, 80, 1), "wide": (48, 208, 1)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _narrow(
    x, w, out, rows, columns, w_row, w_column, scale, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """out [rows, RANK] = scale x [rows, columns] w, with w [columns, RANK] by its strides."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANK)
    total = tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, columns, COLS):
        column = start + tl.arange(0, COLS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        a = tl.load(x + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
        b = tl.load(w + column[:, None] * w_column + rank[None, :] * w_row, mask=column[:, None] < columns, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = out + row[:, None] * RANK + rank[None, :]
    tl.store(place, (total * scale).to(out.dtype.element_ty), mask=row[:, None] < rows)


@triton.jit
def _widen(
    low, w, y, rows, columns, w_row, w_column, scale, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """y [rows, columns] += scale low [rows, RANK] w, with w [RANK, columns] by its strides."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    rank = tl.arange(0, RANK)
    a = tl.load(low + row[:, None] * RANK + rank[None, :], mask=row[:, None] < rows, other=0.0)
    b = tl.load(w + rank[:, None] * w_row + column[None, :] * w_column, mask=column[None, :] < columns, other=0.0)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = y + row[:, None].to(tl.int64) * columns + column[None, :]
    old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    new = old + scale * tl.dot(a, b, input_precision="ieee")
    tl.store(place, new.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _across(x, low, out, rows, columns, share, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out [parts, columns, RANK] = x^T low over each part of `share` rows."""
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    rank = tl.arange(0, RANK)
    total = tl.zeros((COLS, RANK), tl.float32)
    for start in range(part * share, tl.minimum(part * share + share, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        a = tl.load(x + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
        b = tl.load(low + row[:, None] * RANK + rank[None, :], mask=row[:, None] < rows, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    place = out + (part * columns + column[:, None]) * RANK + rank[None, :]
    tl.store(place, total, mask=column[:, None] < columns)


Tile = tuple[int, int, int, int]
"""Rows, columns, warps, stages."""
TILES: dict[str, tuple[Tile, ...]] = {
    "narrow": ((64, 128, 4, 4), (64, 256, 8, 3), (128, 64, 4, 4), (32, 256, 4, 4)),
    "widen": ((64, 128, 4, 1), (128, 128, 8, 1), (32, 256, 4, 1)),
    "across": ((64, 128, 4, 4), (128, 64, 4, 3), (64, 64, 4, 4)),
}


def narrow(x_NC: torch.Tensor, w_CR: torch.Tensor, scale: float, tile: Tile) -> torch.Tensor:
    rows, columns, warps, stages = tile
    out = x_NC.new_empty(x_NC.shape[0], RANK)
    grid = (triton.cdiv(x_NC.shape[0], rows),)
    strides = w_CR.stride(1), w_CR.stride(0)
    _narrow[grid](
        x_NC, w_CR, out, *x_NC.shape, *strides, scale, RANK, rows, columns, num_warps=warps, num_stages=stages
    )
    return out


def widen(y_NC: torch.Tensor, low_NR: torch.Tensor, w_RC: torch.Tensor, scale: float, tile: Tile) -> torch.Tensor:
    rows, columns, warps, stages = tile
    grid = (triton.cdiv(y_NC.shape[0], rows), triton.cdiv(y_NC.shape[1], columns))
    options = dict(num_warps=warps, num_stages=stages)
    _widen[grid](low_NR, w_RC, y_NC, *y_NC.shape, *w_RC.stride(), scale, RANK, rows, columns, **options)
    return y_NC


def across(x_NC: torch.Tensor, low_NR: torch.Tensor, tile: Tile, programs: int = 264) -> torch.Tensor:
    """x^T low [C, R] in fp32; always added up in the same order."""
    rows, columns, warps, stages = tile
    count, width = x_NC.shape
    across_columns = triton.cdiv(width, columns)
    share = triton.cdiv(triton.cdiv(count, max(1, programs // across_columns)), rows) * rows
    parts = triton.cdiv(count, share)
    out = torch.empty(parts, width, RANK, device=x_NC.device, dtype=torch.float32)
    grid = (across_columns, parts)
    _across[grid](x_NC, low_NR, out, count, width, share, RANK, rows, columns, num_warps=warps, num_stages=stages)
    return out.sum(0)


def milliseconds(work: Callable[[], object], repeats: int = 12) -> float:
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth).norm() / truth.norm())


class Case:
    """One linear with its adapter: the products by the library, and by Triton for a tile."""

    def __init__(self, width: int, out: int, tokens: int, dtype: torch.dtype):
        generator = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=dtype, generator=generator)

        self.x, self.dy, self.y, self.dx = (random(tokens, n) for n in (width, out, out, width))
        self.down, self.up, self.weight = random(RANK, width), random(out, RANK), random(out, width) * width**-0.5
        self.low, self.dlow = random(tokens, RANK), random(tokens, RANK)
        size = dtype.itemsize * tokens
        x, dy, dx, low, dlow = self.x, self.dy, self.dx, self.low, self.dlow
        down, up, weight, scale = self.down, self.up, self.weight, 2.0
        self.large = {"x W^T": lambda: x @ weight.t(), "dy W": lambda: dy @ weight}
        self.library: dict[str, Callable[[], torch.Tensor]] = {
            "low": lambda: x @ down.t(),
            "y +=": lambda: self.y.addmm_(low, up.t(), alpha=scale),
            "dlow": lambda: (dy @ up) * scale,
            "dx +=": lambda: dx.addmm_(dlow, down),
            "dA": lambda: dlow.t() @ x,
            "dB": lambda: (dy.t() @ low) * scale,
        }
        self.ours: dict[str, tuple[str, Callable[[Tile], torch.Tensor]]] = {
            "low": ("narrow", lambda tile: narrow(x, down.t(), 1.0, tile)),
            "y +=": ("widen", lambda tile: widen(self.y, low, up.t(), scale, tile)),
            "dlow": ("narrow", lambda tile: narrow(dy, up, scale, tile)),
            "dx +=": ("widen", lambda tile: widen(dx, dlow, down, 1.0, tile)),
            "dA": ("across", lambda tile: across(x, dlow, tile).t()),
            "dB": ("across", lambda tile: across(dy, low, tile) * scale),
        }
        self.bytes = {"low": width, "y +=": 2 * out, "dlow": out, "dx +=": 2 * width, "dA": width, "dB": out}
        self.bytes = {name: count * size for name, count in self.bytes.items()}

    def truth(self, name: str) -> torch.Tensor:
        x, dy, low, dlow, down, up = (t.float() for t in (self.x, self.dy, self.low, self.dlow, self.down, self.up))
        made = {
            "low": lambda: x @ down.t(),
            "y +=": lambda: self.y.float() + 2 * low @ up.t(),
            "dlow": lambda: 2 * dy @ up,
            "dx +=": lambda: self.dx.float() + dlow @ down,
            "dA": lambda: dlow.t() @ x,
            "dB": lambda: 2 * dy.t() @ low,
        }
        return made[name]()

    def check(self) -> dict[str, dict[str, float]]:
        """Relative errors of each product against fp32, of the library and of the worst tile."""
        found = {}
        for name, work in self.library.items():
            kind, ours = self.ours[name]
            target = {"y +=": self.y, "dx +=": self.dx}.get(name)
            kept = None if target is None else target.clone()
            errors = []
            for run in (work, *(partial(ours, tile) for tile in TILES[kind])):
                if target is not None and kept is not None:
                    target.copy_(kept)
                truth = self.truth(name)
                errors.append(error(run(), truth))
            if target is not None and kept is not None:
                target.copy_(kept)
            found[name] = {"library": errors[0], "triton": max(errors[1:])}
        return found


def timed(case: Case) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, work in case.large.items():
        found[name] = {"library": milliseconds(work)}
    for name, work in case.library.items():
        kind, ours = case.ours[name]
        by_tile = {tile: milliseconds(partial(ours, tile)) for tile in TILES[kind]}
        best = min(by_tile, key=lambda tile: by_tile[tile])
        found[name] = {
            "library": milliseconds(work),
            "triton": by_tile[best],
            "tile": best,
            "tiles": {str(tile): ms for tile, ms in by_tile.items()},
            "gigabytes": case.bytes[name] / 1e9,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=32, help="layers for which the totals are")
    parser.add_argument("--check", action="store_true", help="numbers alone, at small shapes")
    parser.add_argument("--out")
    args = parser.parse_args()
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    result: dict[str, Any] = {"machine": machine(), "tokens": args.tokens, "linears": {}}
    totals = {"large": 0.0, "library": 0.0, "triton": 0.0, "best": 0.0}
    for label, (width, out, count) in (SMALL if args.check else LINEARS).items():
        case = Case(width, out, args.tokens, dtype)
        errors = case.check()
        wrong = {name: e for name, e in errors.items() if not e["triton"] <= max(2 * e["library"], 1e-5)}
        assert not wrong, wrong
        print(f"{label}: {width} -> {out}, errors of Triton at most {max(e['triton'] for e in errors.values()):.2g}")
        if args.check:
            continue
        times = timed(case)
        result["linears"][label] = {"errors": errors, "times": times}
        for name, time in times.items():
            if "triton" not in time:
                totals["large"] += args.layers * count * time["library"]
                print(f"  {name:<6} {time['library']:8.3f} ms")
                continue
            for way in ("library", "triton"):
                totals[way] += args.layers * count * time[way]
            totals["best"] += args.layers * count * min(time["library"], time["triton"])
            rates = {way: time["gigabytes"] / time[way] for way in ("library", "triton")}
            print(
                f"  {name:<6} {time['library']:8.3f} ms {rates['library']:6.2f} TB/s   Triton {time['triton']:8.3f} ms "
                f"{rates['triton']:6.2f} TB/s  {time['tile']}"
            )
        del case
    result["totals_ms"] = totals
    if not args.check:
        print(f"{args.layers} layers, ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in totals.items()))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
