"""Boundary stores and plans."""

from __future__ import annotations

import pytest
import torch

from longtune.engine import Plan
from longtune.engine.boundary import DeviceStore, HostStore, make_store
from longtune.errors import UserError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kind", ["device", "host"])
def test_what_was_put_is_taken(kind):
    store = make_store(kind, DEVICE)
    tensors = {(i, c): torch.randn(3, 5, device=DEVICE) for i in range(3) for c in range(2)}
    for _ in range(2):
        for key, tensor in tensors.items():
            store.put(key, tensor.clone())
        store.fetch((1, 0))
        store.fetch("unknown")
        for key in reversed(tensors):
            assert torch.equal(store.take(key), tensors[key])
        with pytest.raises(KeyError):
            store.take((0, 0))


def test_host_buffers_are_used_again():
    store = HostStore(DEVICE)
    for _ in range(50):
        for c in range(4):
            store.put(c, torch.ones(7, device=DEVICE))
        store.take(0)
        store.clear()
    assert sum(len(free) for free in store._free.values()) == 4 and not store._kept


def test_a_host_store_keeps_a_copy():
    store = HostStore(DEVICE)
    tensor = torch.zeros(4, device=DEVICE)
    store.put("x", tensor)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    tensor += 1
    assert torch.equal(store.take("x").cpu(), torch.zeros(4))
    assert isinstance(make_store("device", DEVICE), DeviceStore)


def test_a_plan_names_all_its_faults_at_once():
    with pytest.raises(UserError) as error:
        Plan(layers_per_segment=0, chunk_tokens=-3, head_chunk=True, boundary_store="moon", keep="some")  # pyright: ignore
    places = [problem.place for problem in error.value.problems]
    assert places == [
        "plan: layers_per_segment",
        "plan: chunk_tokens",
        "plan: head_chunk",
        "plan: boundary_store",
        "plan: keep",
    ]
    with pytest.raises(UserError, match="disk is not supported yet"):
        Plan(boundary_store="disk")
