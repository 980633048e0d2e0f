"""Killed runs, resumed until they are done, end as the unbroken one: adapter, losses, validations and log.

A few kills here; bench/kills.py does many. The moments are drawn, so a failure names where the kills hit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_runs_killed_at_any_moment_end_as_the_unbroken_one(tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    # A process of its own: one that has computed anything in threads can't be forked safely.
    command = [sys.executable, "-m", "tests.killing", "--runs", "1", "--kills", "3", "--out", tmp_path / "kills.json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "kills.json").read_text())
    assert {record["method"] for record in records} == {"sft", "orpo"}
    assert all(record["deaths"] for record in records)
    assert not [record for record in records if record["wrong"]], records
