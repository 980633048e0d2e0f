"""Packed short rows and preference pairs on a GPU: longtune beside transformers + PEFT + Liger, in rates.

`sft`: rows of up to 2,048 tokens with the lengths of real ones (`lengths.json`), packed to micro-batches of 16K tokens,
answers trained. `pairs`: ORPO on pairs of about 400 prompt and 150 answer tokens; longtune computes a prompt once, the
peer both whole sequences, padded as TRL's `concatenated_forward` does, or packed end to end. Random weights at a real
shape, random tokens, LoRA r=16 on every linear of the layers. A step is the forward and backward of one micro-batch,
new tokens and lengths in each. Rates are medians over the steps after some to warm up; pairs per second are tokens per
second by the tokens of a pair, on the average of all pairs drawn.

    python bench/short_rows.py --out short.json
    python bench/short_rows.py --part pairs --side ours --compile yes --out pairs.json
    python bench/short_rows.py --shape tiny --tokens 512 --steps 2 --dtype float32        # a test, without a GPU

The peer's settings are tried in turn: adapters in bf16, and in fp32 under autocast; gradient checkpointing as asked for
by `--checkpoint`, and of more and more layers where memory is not enough. Longtune's are the products of `--keep`,
`--keep-layers` and `--chunk`. Each side is one process (Liger patches transformers for good). Before the steps both
sides compute loss and gradient of one small batch with the same adapter, to be compared.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RANK, SHAPES, build, machine, use_liger
from lengths import pairs, supervised
from packed_peer import ADAPTERS, Peer, batch

from longtune.data.batching import Batcher
from longtune.engine import Engine, Plan
from longtune.model.adapters import add_lora
from longtune.objective import get
from longtune.tree import PROMPT, Forest, Node, Targets, Tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {"sft": "sft", "pairs": "orpo"}
CHECKED = 4
"""Rows of the batch on which both sides are compared."""


def row(size: int, trained: int, vocab: int, generator: torch.Generator) -> Tree:
    weights = torch.zeros(size)
    weights[size - trained :] = 1
    return Tree.sequence(torch.randint(10, vocab, (size,), generator=generator), weights)


def pair(prompt: int, chosen: int, rejected: int, vocab: int, generator: torch.Generator, shared: bool) -> Tree:
    """Every token of the chosen sequence is a target but its first, and the rejected answer's."""
    first, *answers = (torch.randint(10, vocab, (n,), generator=generator) for n in (prompt, chosen, rejected))
    if shared:
        nodes = (Node(first), Node(answers[0], 0), Node(answers[1], 0))
        starts = ((prompt - 1, prompt), (prompt - 1, prompt + chosen))
    else:
        nodes = tuple(Node(torch.cat([first, answer])) for answer in answers)
        second = 2 * prompt + chosen
        starts = ((prompt - 1, prompt), (second - 1, second))
    hidden, token, number = [torch.arange(prompt - 1)], [first[1:]], [torch.full((prompt - 1,), PROMPT)]
    for index, ((last, start), answer) in enumerate(zip(starts, answers, strict=True)):
        hidden.append(torch.cat([torch.tensor([last]), torch.arange(start, start + answer.numel() - 1)]))
        token.append(answer)
        number.append(torch.full((answer.numel(),), index))
    return Tree(nodes, Targets.of(torch.cat(hidden), torch.cat(token), None, torch.cat(number)))


def trees(part: str, count: int, args: argparse.Namespace, shared: bool) -> list[Tree]:
    generator = torch.Generator().manual_seed(args.seed)
    vocab: Any = SHAPES[args.shape]["vocab_size"]
    small = args.shape == "tiny"  # Lengths to match, so that a micro-batch holds some rows.
    if part == "sft":
        drawn = [(max(2, n // 8), max(1, m // 8)) if small else (n, m) for n, m in supervised(count, args.seed)]
        return [row(size, min(trained, size - 1), vocab, generator) for size, trained in drawn]
    lengths = pairs(count, args.seed, *((50, 19) if small else (400, 150)))
    return [pair(*each, vocab, generator, shared) for each in lengths]


@dataclass(frozen=True)
class Work:
    """Micro-batches to be timed, of a larger number of rows that both sides have alike.

    Attributes:
        batches: nearly full ones, as many as there are steps.
        tokens: which the model computes in each, padding included.
        examples_per_token, targets_per_token: of all rows.
    """

    batches: list[list[Tree]]
    tokens: list[int]
    examples_per_token: float
    targets_per_token: float


def micro_batches(part: str, args: argparse.Namespace, tokens: int, *, shared: bool, padded: bool = False) -> Work:
    """Rows packed as a run packs them, or batched in their order where they are padded."""
    count, drawn = args.warm + args.steps, 1024  # Rows that are packed together.
    while True:
        rows = trees(part, drawn, args, shared)
        batches = _in_order(rows, tokens) if padded else _packed(rows, tokens)
        sizes = [_padded_size(batch) if padded else sum(tree.size for tree in batch) for batch in batches]
        full = [index for index, size in enumerate(sizes) if size >= 0.75 * tokens][:count]
        if len(full) == count:
            targets = sum(len(tree.targets) for tree in rows)
            chosen = [batches[i] for i in full], [sizes[i] for i in full]
            return Work(*chosen, len(rows) / sum(sizes), targets / sum(sizes))
        drawn *= 2


def _packed(rows: Sequence[Tree], tokens: int) -> list[list[Tree]]:
    batches = Batcher(rows, tokens_per_batch=tokens)
    return [batches.next() for _ in range(len(batches))]


def _padded_size(rows: Sequence[Tree]) -> int:
    lengths = [node.tokens.numel() for tree in rows for node in tree.nodes]
    return len(lengths) * max(lengths)


def _in_order(rows: Sequence[Tree], tokens: int) -> list[list[Tree]]:
    batches = [[rows[0]]]
    for tree in rows[1:]:
        if _padded_size([*batches[-1], tree]) > tokens:
            batches.append([tree])
        else:
            batches[-1].append(tree)
    return batches


def set_adapter(model: torch.nn.Module) -> None:
    """The same numbers in both sides' A and B (B is zero in a fresh adapter)."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted((n, p) for n, p in model.named_parameters() if p.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def gradient_norm(model: torch.nn.Module) -> float:
    grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
    return float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())


Step = Callable[[Any], float]


def timed(name: dict[str, Any], step: Step, made: Sequence[Any], work: Work, model: torch.nn.Module, warm: int):
    """Medians over the steps after `warm`; rates in examples are those of all rows, whose lengths are alike."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    found = dict(name)
    try:
        for each in made:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            found["loss"] = step(each)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            model.zero_grad()
    except torch.OutOfMemoryError as error:
        model.zero_grad()
        gc.collect()
        return {**found, "error": str(error)[:120]}
    rates = [tokens / s for tokens, s in zip(work.tokens, seconds, strict=True)][warm:]
    found["tokens_per_second"] = statistics.median(rates)
    found["trained_tokens_per_second"] = found["tokens_per_second"] * work.targets_per_token
    found["examples_per_second"] = found["tokens_per_second"] * work.examples_per_token
    found["seconds"] = statistics.median(seconds[warm:])
    found["spread"] = (max(rates) - min(rates)) / found["tokens_per_second"]
    found["all_seconds"] = [round(s, 4) for s in seconds]
    if DEVICE == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def peer_side(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    peer = Peer(args.shape, DEVICE, getattr(torch, args.dtype))
    every = [*sorted({*args.checkpoint, peer.layers // 4, peer.layers // 2, peer.layers})]
    for part in args.part:
        variants = (False,) if part == "sft" else (False, True)
        peer.set("fp32", 0)
        set_adapter(peer.model)
        for padded in variants:
            few = Forest(trees(part, CHECKED, args, False))
            loss = peer.step_of(part)(batch(part, few, padded))
            norm = gradient_norm(peer.model)
            yield {"part": part, "side": "peer", "way": f"check{padded:d}", "loss": loss, "gradient": norm}
            peer.model.zero_grad()
        for adapters, tokens, padded in itertools.product(args.adapters, args.peer_tokens, variants):
            if padded and adapters != args.adapters[0]:
                continue
            work = micro_batches(part, args, tokens, shared=False, padded=padded)
            made = [batch(part, Forest(each), padded) for each in work.batches]
            asked = list(args.checkpoint)
            while asked:
                layers = asked.pop(0)
                peer.set(adapters, layers)
                form = ("padded" if padded else "packed") + f" {tokens}"
                name = {"part": part, "side": "peer", "way": f"{form}, {adapters}, {layers} layers checkpointed"}
                found = timed(name, peer.step_of(part), made, work, peer.model, args.warm)
                yield found
                if "error" in found and not asked:
                    asked = [more for more in every if more > layers][:1]


def our_side(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.liger:
        use_liger()
    base: Any = build(args.shape, DEVICE).to(getattr(torch, args.dtype))
    model = add_lora(base, rank=RANK, alpha=2 * RANK)
    model.train()
    set_adapter(model)
    for compiled in {"no": (False,), "yes": (True,), "both": (False, True)}[args.compile]:
        engine = Engine(model, Plan(), compile=compiled)
        for part in args.part:
            objective = get(METHODS[part])

            def step(each: Sequence[Tree], engine: Engine = engine, objective: Any = objective) -> float:
                forest = Forest(each, prompt_targets=objective.uses_prompt_targets)
                return engine.accumulate(forest, objective, objective.totals(forest))["loss"]

            engine.set_plan(Plan(keep=args.keep[0]))
            loss = step(trees(part, CHECKED, args, True))
            norm = gradient_norm(model)
            yield {"part": part, "side": "ours", "way": f"check{compiled:d}", "loss": loss, "gradient": norm}
            model.zero_grad()
            work = micro_batches(part, args, args.tokens, shared=True)
            for keep, chunk, layers in itertools.product(args.keep, args.chunk, args.keep_layers):
                engine.set_plan(Plan(chunk_tokens=chunk or None, keep=keep, keep_layers=layers or None))
                way = (
                    f"keep {keep}" + (f" in {layers} layers" if layers else "") + (f", chunks {chunk}" if chunk else "")
                )
                way += (", compiled" if compiled else "") + (", Liger" if args.liger else "")
                name = {"part": part, "side": "ours", "way": way}
                yield timed(name, step, work.batches, work, model, args.warm)
        engine.close()


def both_sides(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each side in a process of its own; what they printed."""
    passed = [x for x in sys.argv[1:] if x != "both"]
    if "--side" in passed:
        passed.remove("--side")
    found: list[dict[str, Any]] = []
    for side in ("peer", "ours"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, *passed, "--side", side, "--quiet", "--out", file.name]
            subprocess.run(command, check=True)
            found += json.loads(Path(file.name).read_text())["ways"]
    return found


def compared(ways: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each part, the best of each side and the ratio of their rates; how far loss and gradient are apart."""
    made = []
    for part in METHODS:
        best: dict[str, dict[str, Any]] = {}
        checks: dict[str, list[dict[str, Any]]] = {}
        unit = "examples_per_second"  # Both sides have the same rows.
        for way in (w for w in ways if w["part"] == part):
            side = way["side"]
            if way["way"].startswith("check"):
                checks.setdefault(side, []).append(way)
            elif unit in way and way[unit] > best.get(side, {unit: 0.0})[unit]:
                best[side] = way
        if len(best) < 2:
            continue
        pairs_of = list(itertools.product(checks["ours"], checks["peer"]))
        made.append(
            {
                "part": part,
                "unit": "rows per second" if part == "sft" else "pairs per second",
                **{side: {"way": way["way"], "rate": way[unit]} for side, way in best.items()},
                "ratio": best["ours"][unit] / best["peer"][unit],
                "loss_difference": max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in pairs_of),
                "gradient_ratios": [ours["gradient"] / theirs["gradient"] for ours, theirs in pairs_of],
            }
        )
    return made


def show(ways: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> None:
    for part in sorted({way["part"] for way in ways}, reverse=True):
        examples = "rows/s" if part == "sft" else "pairs/s"
        print(f"\n{part:>5} {'s/step':>7} {'tokens/s':>9} {'trained/s':>9} {examples:>8} {'GiB':>6}")
        for way in (w for w in ways if w["part"] == part and not w["way"].startswith("check")):
            if "error" in way:
                print(f"      {'out of memory':>42}  {way['side']}: {way['way']}")
                continue
            peak = way.get("peak_gib", float("nan"))
            print(
                f"      {way['seconds']:>7.3f} {way['tokens_per_second']:>9.0f} "
                f"{way['trained_tokens_per_second']:>9.0f} {way['examples_per_second']:>8.1f} {peak:>6.1f}  "
                f"{way['side']}: {way['way']}"
            )
    for result in results:
        print(
            f"{result['part']}: {result['ratio']:.2f} x the peer's best ({result['unit']});"
            f" loss differs by at most {result['loss_difference']:.2g},"
            f" gradient norms {min(result['gradient_ratios']):.4f} to {max(result['gradient_ratios']):.4f} x"
        )


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--side", choices=("both", "peer", "ours"), default="both")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch of longtune")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="steps before those that are counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", nargs="+", default=["everything"])
    parser.add_argument("--keep-layers", type=int, nargs="+", default=[0], help="0: all")
    parser.add_argument("--chunk", type=int, nargs="+", default=[0], help="0: the whole row")
    parser.add_argument("--compile", choices=("no", "yes", "both"), default="both", help="longtune's layers")
    parser.add_argument("--liger", action="store_true", help="Liger's norm, rotary and GLU in longtune, too")
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=["bf16", "autocast"])
    parser.add_argument(
        "--checkpoint", type=int, nargs="+", default=[0], help="layers of the peer that are checkpointed"
    )
    parser.add_argument("--peer-tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--out")
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    described = {"machine": machine(), "settings": settings}
    if args.side == "both":
        ways = both_sides(args)
    else:
        ways = []
        for way in {"peer": peer_side, "ours": our_side}[args.side](args):
            ways.append(way)
            print(json.dumps(way), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps({**described, "ways": ways}, indent=1))
    results = compared(ways)
    if not args.quiet:
        show(ways, results)
    if args.out:
        Path(args.out).write_text(json.dumps({**described, "ways": ways, "compared": results}, indent=1))


if __name__ == "__main__":
    main()
