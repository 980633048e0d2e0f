"""A whole walk through the Triton kernels gives the plain ones' numbers: attention of trees, softcap, windows, head."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longtune.engine import Engine, Plan
from longtune.head.heads import make_head
from longtune.objective import get
from longtune.tree import Forest
from tests import support

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_gradients_of_packed_trees():
    """gemma2: softcaps in attention and head, sliding windows in every other layer."""
    model = support.with_lora(support.tiny_model("gemma2", torch.float32)).to(DEVICE)
    forest = Forest([support.pair_tree(9, (3, 5)), support.random_sequence(2)])
    found = {}
    for attention in ("reference", "triton"):
        engine = Engine(model, Plan(chunk_tokens=16), attention=attention)
        if attention == "triton":
            engine.head = make_head(engine.stack, 7, "online")
        objective = get("sft")
        loss = engine.accumulate(forest, objective, objective.totals(forest))["loss"]
        found[attention] = loss, support.gradients(model)
        model.zero_grad()
        engine.close()
    assert found["triton"][0] == pytest.approx(found["reference"][0], rel=1e-5)
    assert support.worst(found["triton"][1], found["reference"][1]) < 1e-4
