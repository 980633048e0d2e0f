"""Ranks by sensitivity (`by_kl`) beside one rank for all (`constant`) at the same number of parameters.

SmolLM2-135M, quantised by `longtune quantise` after `longtune sensitivity` on the training rows; LoRA on every linear
of the layers, text to SQL on WikiSQL rows, the loss on the answers alone. Each seed draws other adapters and another
order of rows; both ways see the same rows in the same order. The runs train on a dense copy of the packed weights: the
same numbers, without unpacking them anew at every step.

    python bench/by_kl_smollm2.py --out results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
TRAIN, VALID = DATA / "mlx_wikisql_train.jsonl", DATA / "mlx_wikisql_valid.jsonl"
WAYS = ("constant", "by_kl")
SCALE = 2.0
"""alpha / rank of both ways."""


def longtune(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "longtune.cli", *map(str, arguments)], check=True)


def prepare_base(work: Path, args: argparse.Namespace) -> tuple[Path, Path, Path]:
    """(quantised model, a dense copy of its numbers, sensitivities), each made unless it is there."""
    import torch

    from longtune.export import merged
    from longtune.model.loading import load_model

    figures, base, dense = work / "sensitivity.json", work / "smollm2", work / "smollm2-dense"
    if not figures.exists():
        sizes = ["--tokens", args.sensitivity_tokens, "--row-tokens", 128]
        longtune("sensitivity", "smollm2", "--data", TRAIN, *sizes, "--out", figures)
    if not base.exists():
        longtune("quantise", "smollm2", "--sensitivity", figures, "--target-bpw", args.bpw, "--out", base)
    if not dense.exists():
        loaded = load_model(str(base), dtype="bfloat16", device="cpu")
        merged.write(dense, loaded.model, {}, dtype=torch.bfloat16, tokenizer=loaded.tokenizer)
    return base, dense, figures


def equal_ranks(base: Path, sensitivity: Path, rank: int) -> tuple[dict[str, int], dict[str, int], dict[str, Any]]:
    """Base ranks of both ways with the nearest numbers of parameters, those numbers, and the ranks of by_kl."""
    from longtune.model.adapter_files import linear_sizes
    from longtune.model.loading import load_model
    from longtune.model.rank_sources import find_figures, lora_ranks

    loaded = load_model(str(base), dtype="float32", device="cpu")
    figures = find_figures(loaded.model, base, sensitivity=sensitivity)

    def ranks_of(policy: str, rank: int) -> Any:
        return lora_ranks(loaded.model, figures, rank=rank, policy=policy)

    def parameters(ranks: Any) -> int:
        return sum(r * sum(linear_sizes(loaded.model.get_submodule(name))) for name, r in ranks.by_name.items())

    wanted = parameters(ranks_of("constant", rank))
    nearest = min(range(2, 2 * rank + 1), key=lambda r: abs(parameters(ranks_of("by_kl", r)) - wanted))
    chosen = {"constant": rank, "by_kl": nearest}
    counts = {way: parameters(ranks_of(way, r)) for way, r in chosen.items()}
    return chosen, counts, ranks_of("by_kl", nearest).describe()


def trained(
    dense: Path, sensitivity: Path, way: str, rank: int, seed: int, work: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Validation loss after a run."""
    import longtune as package
    from longtune.config import RunConfig

    config = RunConfig.model_validate(
        {
            "model": str(dense),
            "data": str(TRAIN),
            "valid": str(VALID),
            "answer_after": "\nA: ",
            "output": str(work / f"{way}-{seed}"),
            "lora": {
                "rank": rank,
                "alpha": SCALE * rank,
                "rank_policy": way,
                "sensitivity": None if way == "constant" else str(sensitivity),
            },
            "train": {
                "steps": args.steps,
                "learning_rate": args.learning_rate,
                "batch_size": args.batch,
                "accumulate": 1,
                "seed": seed,
                "eval_every": args.steps,
                "save_every": 0,
                "eval_rows": args.eval_rows,
            },
            "memory": {"keep": "everything", "layers_per_segment": None},
            "device": "cpu",
            "dtype": "bfloat16",
        }
    )
    start = time.perf_counter()
    run = package.train(config)
    found = run.metrics["validation"]
    return {
        "seed": seed,
        "loss": found["loss"],
        "train_loss": run.metrics["loss"],
        "trajectory": [{"step": entry["step"], "loss": entry["loss"]} for entry in run.metrics["trajectory"]],
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8, help="of constant")
    parser.add_argument("--bpw", type=float, default=5.0, help="bits per weight of the base")
    parser.add_argument("--sensitivity-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-rows", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", help="folder for model and runs, kept; a temporary one by default")
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(args.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        base, dense, figures = prepare_base(work, args)
        ranks, parameters, described = equal_ranks(base, figures, args.rank)
        print(f"base ranks {ranks}, parameters {parameters}")
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for seed in range(args.seeds):
            for way in WAYS:
                runs[way].append(trained(dense, figures, way, ranks[way], seed, work, args))
                print(way, runs[way][-1], flush=True)
            result = {
                **machine(),
                "settings": {key: value for key, value in vars(args).items() if key not in ("out", "work")},
                "base_ranks": ranks,
                "parameters": parameters,
                "ranks": {key: value for key, value in described.items() if key != "notes"},
                **compared(runs),
                "runs": runs,
            }
            if args.out:
                Path(args.out).write_text(json.dumps(result, indent=1))
    print(f"{'way':>9} {'parameters':>11} {'mean loss':>10}  each seed")
    for way in WAYS:
        each = ", ".join(f"{run['loss']:.4f}" for run in runs[way])
        print(f"{way:>9} {parameters[way]:>11,} {result['mean_loss'][way]:>10.4f}  {each}")


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Mean validation loss of each way, and the difference seed by seed."""
    gaps = [b["loss"] - c["loss"] for b, c in zip(runs["by_kl"], runs["constant"], strict=True)]
    return {
        "mean_loss": {way: statistics.mean(run["loss"] for run in runs[way]) for way in WAYS},
        "by_kl_minus_constant": {"mean": statistics.mean(gaps), "each": gaps},
    }


if __name__ == "__main__":
    main()
