"""Time and peak memory of `longtune check` on 100,000 chat rows whose texts are those of the real data sets.

    python bench/check_data.py [ROWS]

The rows are written to a temporary folder from ../shared/data (grade-school problems, long instructions with their
answers), each made different by its number. Memory is the sum of the proportional set sizes of the command and of all
processes that it forks, sampled once a second; Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def conversations() -> list[list[dict[str, str]]]:
    """Real conversations, of 3 to 1,900 tokens."""

    def rows(name: str) -> Iterator[dict]:
        return (json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines())

    found = [row["messages"] for row in rows("msft_gsm8k_chat_train.jsonl")]
    for row in rows("gsm8k_test.jsonl"):
        found.append([{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}])
    for row in rows("msft_orca_dpo_pairs_validation.jsonl"):
        found += [row["input"]["messages"] + row[side] for side in ("preferred_output", "non_preferred_output")]
    return found


def write(path: Path, count: int) -> None:
    talks = conversations()
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = [dict(message) for message in talks[number % len(talks)]]
            messages[-2]["content"] = f"{number}. {messages[-2]['content']}"
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def memory(process: psutil.Process) -> int:
    total = 0
    for part in [process, *process.children(recursive=True)]:
        try:
            total += part.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, count)
        print(f"{count:,} rows, {path.stat().st_size / 1e6:.0f} MB", flush=True)
        command = [sys.executable, "-c", "from longtune.cli import main; main()", "check", str(path), "--show", "0"]
        start, peak = time.monotonic(), 0
        run = subprocess.Popen(command)
        process = psutil.Process(run.pid)
        while run.poll() is None:
            try:
                peak = max(peak, memory(process))
            except psutil.Error:
                break
            time.sleep(1)
        seconds = time.monotonic() - start
        print(f"exit code {run.wait()}, {seconds:.0f} s, {count / seconds:,.0f} rows/s, peak {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
