"""On CUDA: boundaries on the host (pinned, asynchronous) give the very numbers that the device gives."""

from __future__ import annotations

import pytest
import torch

from longtune.engine import Engine, Plan
from longtune.tree import Forest
from tests import support

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("keep", ["nothing", "attention"])
@pytest.mark.parametrize("chunk", [None, 64])
def test_host_store_equals_device_store(keep, chunk):
    shape = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64, num_hidden_layers=6)
    model = support.with_lora(support.tiny_model("llama", torch.bfloat16, **shape)).cuda()
    forest = Forest([support.random_sequence(300), support.pair_tree(100, (40, 30))])
    cotangent = -forest.targets.weight
    engine = Engine(model)
    found = {}
    for store in ("device", "host"):
        for repeat in range(3):
            engine.set_plan(Plan(chunk_tokens=chunk, boundary_store=store, keep=keep))
            found[store, repeat] = support.walk_gradients(engine, forest, cotangent)
    engine.close()
    truth = found["device", 0]
    for key, gradients in found.items():
        for name in truth:
            assert torch.allclose(gradients[name], truth[name], rtol=2e-2, atol=1e-3), (key, name)
        assert support.worst(gradients, truth) < 2e-2, key
