"""Predicted beside measured memory and time on a GPU, and a sweep of budgets in which no plan may run out.

Random bf16 weights at real shapes, LoRA r=16 on every linear of the layers, one sequence. Measured: the allocator's
peak over two steps (`max_memory_allocated`) and the seconds of the second. Predicted: the planner's, with rates
measured on the card, and with those it knows of an H200. In the sweep every plan that is said to fit a budget runs for
a step with the allocator capped to it (less the CUDA context).

    python bench/planner_h200.py --out planner.json
    python bench/planner_h200.py --models llama-8b --only part-16k attention-8k --skip-sweep --out some.json
    python bench/planner_h200.py --skip-compare --layers 6 --out sweep.json

A row is named by what it keeps and its tokens (`--list` shows the names). `fitted` says whether a row was among those
that rates were fitted to; the others test them. `--layers` cuts the models short, `--compile` compiles the layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from typing import Any

import torch
from common import RANK, SHAPES, machine
from transformers import AutoConfig, AutoModelForCausalLM

from longtune.engine import Engine, Plan, devices
from longtune.engine.budget import CONTEXT, Budget
from longtune.engine.forecast import Row
from longtune.engine.planner import Planner, Prediction
from longtune.model.adapters import add_lora
from longtune.objective import get

MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": dict(kind="llama", tie_word_embeddings=False, **SHAPES["llama-8b"]),
    "qwen3-1.7b": dict(
        kind="qwen3",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "gemma3-4b": dict(
        kind="gemma3_text",
        vocab_size=262208,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(34)],
    ),
}

SETTINGS: dict[str, list[tuple[int, dict[str, Any], bool]]] = {
    "llama-8b": [
        (1024, dict(keep="everything"), True),
        (4096, dict(keep="everything"), True),
        (3000, dict(keep="attention"), True),
        (8192, dict(keep="attention"), True),
        (8192, dict(chunk_tokens=2048, keep="kv", boundary_store="host"), True),
        (16384, dict(chunk_tokens=8192, keep="attention"), True),
        (16384, dict(chunk_tokens=4096, boundary_store="host"), True),
        (16384, dict(chunk_tokens=2048, boundary_store="host", layers_per_segment=4), True),
        (32768, dict(chunk_tokens=8192, boundary_store="host"), True),
        (32768, dict(chunk_tokens=16384, boundary_store="host", keep="attention"), True),
        (65536, dict(chunk_tokens=8192, boundary_store="host", keep="attention"), True),
        (8192, dict(keep="everything", keep_layers=16), False),
        (16384, dict(keep="everything", keep_layers=8, keep_below="attention", boundary_store="host"), False),
        (32768, dict(keep="everything", keep_layers=17, keep_below="attention", boundary_store="host"), False),
        (24576, dict(chunk_tokens=8192, keep="attention", boundary_store="host"), False),
        (12000, dict(chunk_tokens=4096), False),
    ],
    "qwen3-1.7b": [
        (2048, dict(keep="everything"), True),
        (16384, dict(keep="everything"), True),
        (16384, dict(chunk_tokens=4096, boundary_store="host"), True),
        (32768, dict(keep="attention"), True),
        (65536, dict(chunk_tokens=8192, boundary_store="host"), True),
        (32768, dict(chunk_tokens=2048, boundary_store="disk"), True),
        (32768, dict(chunk_tokens=8192, keep="everything", keep_layers=14, keep_below="attention"), False),
        (8192, dict(keep="attention"), False),
    ],
    "gemma3-4b": [
        (2048, dict(keep="everything"), False),
        (8192, dict(keep="attention"), False),
        (8192, dict(keep="everything", keep_layers=12, keep_below="attention"), False),
        (16384, dict(chunk_tokens=4096, boundary_store="host"), False),
        (32768, dict(chunk_tokens=8192, boundary_store="host", keep="attention"), False),
    ],
}
"""Tokens, plan, and whether rates were fitted to the row."""


def label(tokens: int, keys: dict[str, Any]) -> str:
    """A row's name."""
    what = "part" if "keep_layers" in keys else keys.get("keep", "nothing")
    chunk = f"-{keys['chunk_tokens']}" if "chunk_tokens" in keys else ""
    return f"{what}{chunk}-{f'{tokens // 1024}k' if tokens % 1024 == 0 else tokens}"


SWEEP: dict[str, tuple[int, int]] = {"llama-8b": (8192, 10), "qwen3-1.7b": (16384, 6), "gemma3-4b": (8192, 4)}
"""Tokens, and how many budgets."""


class Bench:
    """One model on the card."""

    def __init__(self, name: str, layers: int | None = None, compile: bool = False):
        settings = dict(MODELS[name])
        if layers is not None:
            settings["num_hidden_layers"] = layers
            if "layer_types" in settings:
                settings["layer_types"] = settings["layer_types"][:layers]
        config = AutoConfig.for_model(settings.pop("kind"), max_position_embeddings=1 << 20, **settings)
        torch.manual_seed(0)
        with torch.device("cuda"):
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
        self.name = name
        self.model = add_lora(base, rank=RANK, alpha=32)
        self.model.train()
        self.compiled = compile
        self.engine = Engine(self.model, compile=compile)
        self.objective = get("sft")
        self.optimiser = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        text = config
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        card = torch.device("cuda", torch.cuda.current_device())
        heads, key_heads = text.num_attention_heads, text.num_key_value_heads
        self.device = devices.measure(card, torch.bfloat16, heads=heads, key_heads=key_heads, width=width)
        self.issued = 0.0
        self.step(Plan(chunk_tokens=512), Row(64))

    def step(self, plan: Plan, row: Row) -> float:
        """Seconds of a step; `issued` are those until the host had nothing left to launch."""
        self.engine.set_plan(plan)
        forest = row.forest()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.engine.accumulate(forest, self.objective, self.objective.totals(forest))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.issued = time.perf_counter() - start
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def planner(self, device: devices.Device) -> Planner:
        return Planner(self.model, device, like=self.engine)

    def seconds(self, prediction: Prediction) -> float:
        return (prediction.compiled if self.compiled else prediction.seconds).total


def compare(bench: Bench, only: list[str] | None) -> list[dict[str, Any]]:
    rows = []
    known = devices.known("h200")
    with bench.planner(bench.device) as measured, bench.planner(known) as assumed:
        for tokens, keys, fitted in SETTINGS[bench.name]:
            if only is not None and label(tokens, keys) not in only:
                continue
            plan, row = Plan(**keys), Row(tokens)
            start = time.perf_counter()
            prediction = measured.predict(plan, row)
            planning = time.perf_counter() - start
            by_table = assumed.predict(plan, row)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            first = bench.step(plan, row)
            seconds = bench.step(plan, row) if first < 30 else first
            expected, expected_by_table = bench.seconds(prediction), bench.seconds(by_table)
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            rows.append(
                {
                    "model": bench.name,
                    "tokens": tokens,
                    "plan": keys,
                    "fitted": fitted,
                    "compiled": bench.compiled,
                    "predicted_bytes": prediction.peak_bytes,
                    "measured_bytes": peak,
                    "error": prediction.peak_bytes / peak - 1,
                    "needed_bytes": prediction.needed_bytes - CONTEXT,
                    "reserved_bytes": reserved,
                    "predicted_seconds": expected,
                    "predicted_seconds_table": expected_by_table,
                    "measured_seconds": seconds,
                    "issued_seconds": bench.issued,
                    "first_seconds": first,
                    "predicted_first": prediction.seconds.first,
                    "time_error": expected / seconds - 1,
                    "time_error_table": expected_by_table / seconds - 1,
                    "terms": prediction.terms,
                    "seconds": {name: getattr(prediction.seconds, name) for name in prediction.seconds.__slots__},
                    "phases": prediction.phases,
                    "planning_seconds": planning,
                }
            )
            r = rows[-1]
            print(
                f"{bench.name:<11} {tokens:>6} {keys!s:<76} {r['predicted_bytes'] / 2**30:.2f} / {peak / 2**30:.2f} GiB"
                f" {r['error']:+6.1%} (reserved {reserved / 2**30:.2f}, needed {r['needed_bytes'] / 2**30:.2f})"
                f"  {r['predicted_seconds']:6.2f} / {seconds:6.2f} s {r['time_error']:+6.1%}"
                f" table {r['time_error_table']:+6.1%}",
                flush=True,
            )
    return rows


def sweep(bench: Bench, tokens: int, count: int) -> list[dict[str, Any]]:
    """Budgets from the least that some plan fits to what keeping everything takes."""
    rows = []
    row = Row(tokens)
    total = torch.cuda.get_device_properties(0).total_memory
    with bench.planner(bench.device) as planner:
        room = Budget(total, 64 << 30, 0)
        least = planner.smallest(row, room).needed_bytes
        most = planner.predict(Plan(keep="everything"), row).needed_bytes
        top = min(1.05 * most, 0.95 * total)
        for number in range(count):
            budget = int(1.01 * least * (top / (1.01 * least)) ** (number / max(1, count - 1)))
            chosen = planner.choose(row, Budget(budget, 64 << 30, 0))
            entry: dict[str, Any] = {
                "model": bench.name,
                "tokens": tokens,
                "budget": budget,
                "fits": chosen is not None,
            }
            if chosen is not None:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.set_per_process_memory_fraction((budget - CONTEXT) / total)
                try:
                    entry["seconds"] = bench.step(chosen.plan, row)
                    entry["out_of_memory"] = False
                except torch.OutOfMemoryError as error:
                    entry |= {"out_of_memory": True, "message": str(error).splitlines()[0]}
                    bench.optimiser.zero_grad(set_to_none=True)
                finally:
                    torch.cuda.set_per_process_memory_fraction(1.0)
                entry |= {
                    "plan": chosen.plan.as_dict(),
                    "predicted_bytes": chosen.peak_bytes,
                    "measured_bytes": torch.cuda.max_memory_allocated(),
                    "reserved_bytes": torch.cuda.max_memory_reserved(),
                    "predicted_seconds": chosen.seconds.total,
                }
            rows.append(entry)
            print(json.dumps(entry), flush=True)
    return rows


def summary(rows: list[dict[str, Any]], sweep: list[dict[str, Any]]) -> dict[str, Any]:
    tested = [r for r in rows if not r["fitted"]]
    return {
        "settings": len(rows),
        "within_5_percent": sum(abs(r["error"]) <= 0.05 for r in rows),
        "lowest_error": min((r["error"] for r in rows), default=None),
        "time_within_15_percent": sum(abs(r["time_error"]) <= 0.15 for r in rows),
        "time_within_15_percent_table": sum(abs(r["time_error_table"]) <= 0.15 for r in rows),
        "out_of_sample": len(tested),
        "time_within_15_percent_out_of_sample": sum(abs(r["time_error"]) <= 0.15 for r in tested),
        "budgets": len(sweep),
        "said_to_fit": sum(r["fits"] for r in sweep),
        "ran_out": sum(r.get("out_of_memory", False) for r in sweep),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="planner.json")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="rows by name")
    parser.add_argument("--list", action="store_true", help="show the rows' names and end")
    parser.add_argument("--skip-sweep", action="store_true")
    parser.add_argument("--skip-compare", action="store_true")
    parser.add_argument("--layers", type=int, help="of the models, instead of all")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.list:
        for name in args.models:
            print(name, *(label(tokens, keys) for tokens, keys, _ in SETTINGS[name]))
        return
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"machine": machine(), "rates": {}, "rows": [], "sweep": []}
    for name in args.models:
        bench = Bench(name, args.layers, args.compile)
        result["rates"][name] = {field: getattr(bench.device, field) for field in bench.device.__slots__}
        print(result["rates"][name], flush=True)
        if not args.skip_compare:
            result["rows"] += compare(bench, args.only)
        if not args.skip_sweep:
            result["sweep"] += sweep(bench, *SWEEP[name])
        rows = result["rows"]
        result["summary"] = summary(rows, result["sweep"])
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)
        bench.engine.close()
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(result["summary"]))


if __name__ == "__main__":
    main()
