"""What a filter of small softmax coefficients could skip in the loss head's gradient product, and what it would cost.

g = onehot - softmax(logits) of real text under a real model. A tile of targets x vocabulary whose coefficients are all
below eps contributes little to g W: how many tiles are there, in the tokenizer's order of the vocabulary and sorted by
mean probability, and how far is d(hidden) off without them? Beside them: single coefficients below eps (what no tile
can beat), and columns that are below eps for all targets (all that a library's product could leave out).

    python bench/head_filter.py smollm2 ../shared/data/msft_gsm8k_chat_train.jsonl --tokens 4096
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from common import machine

from longtune.engine import Engine, Plan
from longtune.model.loading import load_model
from longtune.tree import Forest, Tree

TILES = ((64, 64), (128, 128), (128, 256), (128, 512))


def texts(value: object) -> list[str]:
    """All strings of a JSON value that are prose rather than keys."""
    if isinstance(value, str):
        return [value] if len(value) > 20 else []
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for child in children for text in texts(child)]


def read(file: Path, tokenizer, wanted: int) -> torch.Tensor:
    """The first tokens of a JSONL file's texts, one after another."""
    found: list[int] = []
    for line in file.read_text().splitlines():
        for text in texts(json.loads(line)):
            found += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if len(found) >= wanted:
            break
    return torch.tensor(found[:wanted])


def coefficients(hidden: torch.Tensor, weight: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, float]:
    """onehot - softmax, [M, V] in fp32, and the mean loss."""
    made = torch.empty(hidden.shape[0], weight.shape[0])
    losses = []
    for start in range(0, hidden.shape[0], 256):
        own = slice(start, start + 256)
        logits = hidden[own] @ weight.t()
        losses.append(torch.nn.functional.cross_entropy(logits, token[own], reduction="none"))
        torch.softmax(logits, -1, out=made[own])
    made.neg_()
    made[torch.arange(token.numel()), token] += 1
    return made, float(torch.cat(losses).mean())


def tiles(g: torch.Tensor, size: tuple[int, int], eps: float) -> torch.Tensor:
    """Which tiles are wholly below eps, [M / rows, V / columns]; the last ones may be smaller."""
    rows, columns = size
    pad = (0, -g.shape[1] % columns, 0, -g.shape[0] % rows)
    largest = torch.nn.functional.pad(g.abs(), pad).unflatten(1, (-1, columns)).amax(2)
    return largest.unflatten(0, (-1, rows)).amax(1) < eps


def error(g: torch.Tensor, weight: torch.Tensor, skipped: torch.Tensor, size: tuple[int, int]) -> float:
    """Relative error of g W without some tiles."""
    rows, columns = size
    missing, total = 0.0, 0.0
    for index, start in enumerate(range(0, g.shape[0], rows)):
        own = g[start : start + rows]
        gone = skipped[index].repeat_interleave(columns)[: g.shape[1]]
        missing += float((torch.where(gone, own, 0.0) @ weight).square().sum())
        total += float((own @ weight).square().sum())
    return (missing / total) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--eps", type=float, default=1e-5)
    parser.add_argument("--out")
    args = parser.parse_args()
    loaded = load_model(args.model, dtype="float32", device="cpu")
    engine = Engine(loaded.model, Plan())
    result: dict[str, object] = {"machine": machine(), "model": args.model, "eps": args.eps, "tokens": args.tokens}
    rows: list[dict[str, object]] = []
    weight = engine.head.form.weight.detach().float()  # pyright: ignore[reportAttributeAccessIssue]
    for file in args.files:
        ids = read(file, loaded.tokenizer, args.tokens + 1)
        parts = []
        with torch.no_grad():
            for own in ids[:-1].split(args.row_tokens):
                walk = engine.walk(Forest([Tree.sequence(own)]), (0, 0), grad=False)
                walk.forward()
                parts.append(walk.hidden())
        g, loss = coefficients(torch.cat(parts).float(), weight, ids[1:])
        below = g.abs() < args.eps
        entry: dict[str, object] = {
            "file": file.name,
            "loss": loss,
            "coefficients_below": float(below.float().mean()),
            "columns_below_for_all": float(below.all(0).float().mean()),
            "targets_below_in_all": float(below.all(1).float().mean()),
            "tiles": [],
        }
        order = g.abs().mean(0).argsort(descending=True)
        for size in TILES:
            shown: dict[str, object] = {"size": list(size)}
            for name, matrix, rows_of in (("as_is", g, weight), ("sorted", g[:, order], weight[order])):
                skipped = tiles(matrix, size, args.eps)
                shown[name] = float(skipped.float().mean())
                shown[f"{name}_error"] = error(matrix, rows_of, skipped, size)
            entry["tiles"].append(shown)  # pyright: ignore[reportAttributeAccessIssue]
        rows.append(entry)
        print(json.dumps(entry), flush=True)
    engine.close()
    if args.out:
        Path(args.out).write_text(json.dumps(result | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
