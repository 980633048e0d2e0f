"""Runs killed at random moments and resumed until they are done: is the adapter that of an unbroken run, bit for bit?

    python bench/kills.py --out kills.json

Tiny models on the CPU, SFT and ORPO with dropout, accumulation, packing and shuffling on; the machinery and what is
compared lie in tests/killing.py. Prints one line for each run, and a table of where the kills hit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.killing import EXTRA, METHODS, SETTINGS, campaigns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="runs in all, shared by the methods")
    parser.add_argument("--kills", type=int, default=3, help="most kills of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    records = campaigns(asked.runs // len(METHODS), asked.kills, asked.seed)
    deaths = [death for record in records for death in record["deaths"]]
    where = Counter(
        "a checkpoint half written" if death["half_written"] else f"after {death['after'] or 'nothing yet'}"
        for death in deaths
    )
    wrong = [record for record in records if record["wrong"]]
    print(f"{len(records)} runs, {len(deaths)} kills, {len(records) - len(wrong)} equal to the unbroken run")
    for place, count in where.most_common():
        print(f"{count:4}  {place}")
    if asked.out:
        import torch

        result = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "settings": {**SETTINGS, "extra": EXTRA},
            "runs": len(records),
            "kills": len(deaths),
            "equal": len(records) - len(wrong),
            "where": dict(where),
            "records": records,
        }
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
