"""Boundary stores and plans."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys

import psutil
import pytest
import torch

from longtune.engine import Engine, Plan
from longtune.engine.boundary import DeviceStore, HostStore, make_store
from longtune.errors import DoesNotFit, UserError
from longtune.objective import get
from longtune.tree import Forest
from tests import support

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


KINDS = ["device", "host", "disk"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_is_read_and_taken(kind, tmp_path):
    store = make_store(kind, DEVICE, tmp_path)
    shapes = [((3, 5), torch.float32), ((1, 7, 2), torch.bfloat16), ((0, 4), torch.float64), ((), torch.int64)]
    tensors = {
        (i, c): torch.randint(100, shape, device=DEVICE).to(dtype)
        for i in range(3)
        for c, (shape, dtype) in enumerate(shapes)
    }
    for _ in range(2):
        for key, tensor in tensors.items():
            store.put(key, tensor.clone())
        store.fetch((1, 0))
        store.fetch("unknown")
        for key in reversed(tensors):
            assert torch.equal(store.read(key), tensors[key])
            store.fetch(key)
            assert torch.equal(store.take(key), tensors[key])
        with pytest.raises(KeyError):
            store.take((0, 0))
        store.put("x", tensors[0, 0])
        store.fetch("x")
        store.drop("x")
        store.drop("x")
        with pytest.raises(KeyError):
            store.read("x")
    store.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_sections_have_keys_of_their_own_and_one_memory(kind, tmp_path):
    store = make_store(kind, DEVICE, tmp_path)
    one, other = store.section(), store.section()
    one.put("x", torch.ones(3, device=DEVICE))
    other.put("x", torch.zeros(3, device=DEVICE))
    assert one.take("x").sum() == 3
    held = store.bytes
    del one
    for _ in range(100):
        part = store.section()
        part.put("y", torch.ones(1 << 20, device=DEVICE))
        del part
    assert other.take("x").sum() == 0
    assert store.bytes == held


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_a_section_keeps_outlives_the_store(kind, tmp_path):
    store = make_store(kind, DEVICE, tmp_path)
    section = store.section()
    kept = {number: torch.full((100,), float(number), device=DEVICE) for number in range(6)}
    for number in range(3):
        section.put(number, kept[number])
    store.close()
    for number in range(3):
        section.put(number + 3, kept[number + 3])
        if number < 2:
            assert torch.equal(section.take(number), kept[number])
    assert all(torch.equal(section.take(number), kept[number]) for number in range(2, 6))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_rows_of_any_lengths_cost_no_more_than_the_largest(kind, tmp_path):
    store = make_store(kind, DEVICE, tmp_path)
    generator = torch.Generator().manual_seed(0)
    largest = 0
    for step in range(60):
        chunk = (1 << 21) - step * 4111
        tail = int(torch.randint(1, chunk, (1,), generator=generator))
        for c, size in enumerate([chunk] * 19 + [tail]):
            store.put(c, torch.zeros(size, device=DEVICE))
        for c in range(20):
            store.take(c)
        largest = max(largest, store.bytes)
        if step == 0:
            first = store.bytes
    assert largest == first


def test_a_host_store_keeps_a_copy():
    store = HostStore(DEVICE)
    tensor = torch.zeros(4, device=DEVICE)
    store.put("x", tensor)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    tensor += 1
    assert torch.equal(store.take("x").cpu(), torch.zeros(4))
    assert isinstance(make_store("device", DEVICE), DeviceStore)


def test_many_tensors_in_flight_stay_apart(tmp_path):
    """More than a ring holds, taken in another order, with overwritten sources."""
    for kind in ("host", "disk"):
        store = make_store(kind, DEVICE, tmp_path)
        for i in range(40):
            store.put(i, torch.full((1000,), float(i), device=DEVICE))
            if i % 3 == 2:
                store.fetch(i - 2)
        for i in sorted(range(40), key=lambda i: i * 7 % 40):
            assert torch.equal(store.take(i).cpu(), torch.full((1000,), float(i)))
        store.close()


def test_a_disk_store_leaves_no_file_even_when_killed(tmp_path):
    script = (
        "import sys, os, signal, torch; from pathlib import Path; from longtune.engine.boundary import make_store\n"
        f"store = make_store('disk', torch.device('cpu'), Path({str(tmp_path)!r}))\n"
        "store.put(0, torch.ones(1 << 20)); assert store.bytes >= 4 << 20\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == -9, found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_the_step(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    store = make_store("disk", DEVICE, tmp_path)
    with pytest.raises(DoesNotFit, match="No space left on device"):
        store.put(0, torch.ones(8, device=DEVICE))


def test_a_plan_names_all_its_faults_at_once():
    with pytest.raises(UserError) as error:
        Plan(layers_per_segment=0, chunk_tokens=-3, head_chunk=True, keep_layers=0, boundary_store="moon", keep="some")  # pyright: ignore
    places = [problem.place for problem in error.value.problems]
    assert places == [
        "plan: layers_per_segment",
        "plan: chunk_tokens",
        "plan: head_chunk",
        "plan: keep_layers",
        "plan: boundary_store",
        "plan: keep",
    ]


@pytest.mark.parametrize(("kind", "steps"), [("host", 200), ("disk", 50)])
def test_memory_after_many_steps_is_that_after_a_few(kind, steps, tmp_path):
    """Rows of uneven lengths, walks that fail, and walks that are never walked back."""
    model = support.with_lora(support.tiny_model("llama", torch.float32))
    plan = Plan(chunk_tokens=8, boundary_store=kind, keep="attention")
    engine = Engine(model, plan, scratch=tmp_path)
    objective = get("sft")
    process = psutil.Process()
    held: list[tuple[int, int]] = []
    for step in range(steps):
        forest = Forest([support.random_sequence(25 + step * 7 % 23, seed=step)])
        engine.accumulate(forest, objective, objective.totals(forest))
        if step % 20 == 0:
            engine.walk(forest, (0, 0), grad=True).forward()
        if step % 30 == 0:
            with pytest.raises((RuntimeError, IndexError), match="size"):
                walk = engine.walk(forest, (0, 0), grad=True)
                walk.forward()
                walk.head(torch.ones(3))
        if step in (19, steps - 1):
            gc.collect()
            stores = engine.boundaries.bytes + engine.moving.bytes  # pyright: ignore[reportAttributeAccessIssue]
            held.append((stores, process.memory_info().rss))
    assert held[0][0] == held[1][0]
    assert held[1][1] - held[0][1] < 16 << 20
    assert list(tmp_path.iterdir()) == []
