"""Bits where they are needed: SmolLM2-135M quantised by measured sensitivities beside the same width everywhere.

For each seed, other rows are drawn: some to measure sensitivities on, others to compare the quantised models on (mean
KL divergence from the plain model's next-token distribution, in nats). Rows are tables and questions (WikiSQL) and
answers to arithmetic problems (GSM8K). Models are written by the code of `longtune quantise`, and read from their
folders.

    python bench/quantise_smollm2.py --out results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import machine

from longtune.data import load_dataset
from longtune.model.loading import load_model
from longtune.model.packed import Format
from longtune.model.packed.loader import load_packed
from longtune.quantise import (
    Sample,
    Unit,
    Widths,
    choose_widths,
    find_units,
    measure,
    samples_of,
    uniform_widths,
    write_checkpoint,
)
from longtune.quantise.sensitivity import divergence
from longtune.quantise.writing import plain_size

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
SOURCES = {
    "measured": ("mlx_wikisql_train.jsonl", slice(None), "msft_gsm8k_chat_train.jsonl", slice(0, 250)),
    "compared": ("mlx_wikisql_valid.jsonl", slice(None), "msft_gsm8k_chat_train.jsonl", slice(250, None)),
}
LOW = Format("affine", 4, 64)
TARGETS = (5.0, 5.625)
"""Bits per weight of the mixed models; 4 bits in groups of 64 take 4.5, and a quarter more is 5.625."""
UNIFORM = {
    "4 bits, groups of 64": LOW,
    "4 bits, groups of 32": Format("affine", 4, 32),
    "5 bits, groups of 64": Format("affine", 5, 64),
}


def draw(trees: dict[str, Sequence[Any]], kind: str, tokens: int, row_tokens: int, seed: int) -> list[Sample]:
    """Half of the tokens from each source."""
    text, rows, chat, turns = SOURCES[kind]
    chosen = (trees[text][rows], trees[chat][turns])
    return [s for part in chosen for s in samples_of(part, tokens=tokens // 2, row_tokens=row_tokens, seed=seed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="to measure sensitivities on")
    parser.add_argument("--compare-tokens", type=int, default=1024)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--high-bits", type=int, nargs="+", default=[8], help="widths of the sensitive modules")
    parser.add_argument("--out")
    args = parser.parse_args()
    higher = [Format("affine", bits, 64) for bits in sorted(args.high_bits)]
    # Written in the dtype of the original, measured in fp32.
    stored = load_model("smollm2", dtype="bfloat16", device="cpu")
    wide = load_model("smollm2", dtype="float32", device="cpu")
    files = sorted({name for source in SOURCES.values() for name in source[::2]})
    trees = {name: load_dataset(DATA / name, wide.tokenizer, method="sft", max_tokens=8192).trees for name in files}
    units, _ = find_units(wide.model, 64)
    own = {unit.name: unit for unit in find_units(stored.model, 64)[0]}
    packed_units = [own[unit.name] for unit in units]
    plain = plain_size(stored.model, packed_units)

    def compared(widths: Widths, samples: Sequence[Sample], work: Path) -> dict[str, float]:
        write_checkpoint(work, stored.model, stored.tokenizer, packed_units, widths, source=stored.path)
        size = sum(file.stat().st_size for file in work.glob("*.safetensors"))
        other = load_packed(work, torch.float32, torch.device("cpu"))
        kl = divergence(wide.model, samples, lambda _: other)
        return {"bits_per_weight": widths.bits_per_weight, "megabytes": size / 1e6, "kl": kl}

    runs = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        start = time.process_time()
        samples = draw(trees, "measured", args.tokens, args.row_tokens, seed)
        figures = measure(wide.model, samples, [(unit, LOW) for unit in units])
        seconds = time.process_time() - start
        kl = {unit.name: {LOW.bits: figure} for unit, figure in zip(units, figures, strict=True)}
        held = draw(trees, "compared", args.compare_tokens, args.row_tokens, seed)
        found: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, format in UNIFORM.items():
                same = uniform_widths(packed_units, format, plain, 16)
                found[f"uniform: {name}"] = compared(same, held, Path(folder) / name.replace(" ", "-"))
            for target in TARGETS:
                mixed = choose_widths(packed_units, [LOW, *higher], target, kl, plain, 16)
                raised = [name for name, format in mixed.formats.items() if format != LOW]
                entry = compared(mixed, held, Path(folder) / f"mixed-{target}")
                found[f"mixed, {' '.join(map(str, [4, *args.high_bits]))} bits, {target:g}"] = {
                    **entry,
                    "raised": len(raised),
                }
        predictions = [sum(s.positions.numel() for s in part) for part in (samples, held)]
        runs.append(
            {
                "seed": seed,
                "predictions_measured": predictions[0],
                "predictions_compared": predictions[1],
                "cpu_seconds_of_sensitivities": seconds,
                "most_sensitive": _top(units, figures),
                "models": found,
            }
        )
        print(json.dumps(runs[-1]), flush=True)
    ways = list(runs[0]["models"])
    table = {
        way: {
            "bits_per_weight": statistics.mean(run["models"][way]["bits_per_weight"] for run in runs),
            "megabytes": statistics.mean(run["models"][way]["megabytes"] for run in runs),
            "kl": [run["models"][way]["kl"] for run in runs],
            "mean_kl": statistics.mean(run["models"][way]["kl"] for run in runs),
        }
        for way in ways
    }
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    result = {**machine(), "settings": settings, "table": table, "runs": runs}
    print(f"{'bits':>6} {'MB':>6} {'KL':>9}  way")
    for way, row in table.items():
        print(f"{row['bits_per_weight']:>6.3f} {row['megabytes']:>6.1f} {row['mean_kl']:>9.5f}  {way}  {row['kl']}")
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def _top(units: Sequence[Unit], figures: Sequence[float], count: int = 8) -> dict[str, float]:
    order = sorted(zip(units, figures, strict=True), key=lambda pair: pair[1], reverse=True)
    return {unit.name: figure for unit, figure in order[:count]}


if __name__ == "__main__":
    main()
