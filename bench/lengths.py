"""Lengths of real rows in tokens, for benchmarks of packed rows: numbers alone, no text.

    python bench/lengths.py ../shared/data     # makes lengths.json anew

Supervised rows are (tokens, trained tokens, the trained ones last), preference pairs (prompt, chosen, rejected),
counted with SmolLM2's tokenizer and chat template: tables and questions with SQL (WikiSQL), dialogues, arithmetic
problems (GSM8K), and answers of language models (Orca pairs; both answers as supervised rows).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

FILE = Path(__file__).with_name("lengths.json")
LONGEST = 2048
SUPERVISED = {
    "mlx_wikisql_train.jsonl": None,
    "fastchat_dummy_conversation.json": None,
    "msft_gsm8k_chat_train.jsonl": None,
    "gsm8k_test.jsonl": {"question": "prompt", "answer": "completion"},
}
PREFERENCE = "msft_orca_dpo_pairs_validation.jsonl"


def supervised(count: int, seed: int) -> list[tuple[int, int]]:
    """Rows drawn with replacement: tokens and trained tokens of each, up to 2,048."""
    drawn = random.Random(seed).choices(json.loads(FILE.read_text())["supervised"], k=count)
    return [(size, trained) for size, trained in drawn]


def pairs(count: int, seed: int, prompt: float = 400, answer: float = 150) -> list[tuple[int, int, int]]:
    """Pairs drawn with replacement, their lengths stretched so that the file's means are `prompt` and `answer`."""
    known: list[list[int]] = json.loads(FILE.read_text())["pairs"]
    by_prompt = prompt * len(known) / sum(p for p, _, _ in known)
    by_answer = 2 * answer * len(known) / sum(c + r for _, c, r in known)
    drawn = random.Random(seed).choices(known, k=count)
    return [
        (max(2, round(p * by_prompt)), max(1, round(c * by_answer)), max(1, round(r * by_answer))) for p, c, r in drawn
    ]


def main(folder: Path) -> None:
    from longtune.data import load_dataset
    from longtune.model.loading import load_model

    tokenizer = load_model("smollm2", dtype="float32", device="cpu").tokenizer
    rows: list[tuple[int, int]] = []
    for name, columns in SUPERVISED.items():
        data = load_dataset(folder / name, tokenizer, max_tokens=LONGEST, overlong="drop", columns=columns)
        rows += [(tree.size, len(tree.targets)) for tree in data.trees]
    trees = load_dataset(folder / PREFERENCE, tokenizer, method="orpo", max_tokens=LONGEST, overlong="drop").trees
    found = [[node.tokens.numel() for node in tree.nodes] for tree in trees]
    rows += [(p + answer, answer) for p, *answers in found for answer in answers]
    some = random.Random(0).sample(rows, 512)
    made = {"supervised": some, "pairs": found}
    FILE.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    print(f"{len(rows)} rows (512 kept), {len(found)} pairs, mean {sum(n for n, _ in some) / 512:.0f} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
