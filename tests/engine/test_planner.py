"""The planner's choices: they fit, nothing faster was there, and given keys stay."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from longtune.engine import Plan, cost, devices
from longtune.engine.budget import CONTEXT, Budget, budget_here, memory_bytes
from longtune.engine.devices import Device, known
from longtune.engine.forecast import Row
from longtune.engine.meter import CLASSES
from longtune.engine.planner import Planner
from longtune.engine.workspace import Work
from longtune.errors import UserError
from longtune.model.adapters import add_lora
from tests.support import tiny_config, tiny_model

CARD = known("rtx4090")
ROOM = 1 << 40


def meta_llama(layers=5, hidden=256, **changes):
    from transformers import AutoModelForCausalLM

    settings = dict(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, head_dim=64)
    config = tiny_config("llama", **settings, vocab_size=2000, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return add_lora(model.requires_grad_(False), rank=8, alpha=16).train()


@pytest.fixture(scope="module")
def planner():
    with Planner(meta_llama(), CARD) as found:
        yield found


def budget(device, host=ROOM, disk=ROOM):
    return Budget(int(device), int(host), int(disk))


def test_where_there_is_room_everything_is_kept_in_one_chunk(planner):
    chosen = planner.choose(Row(512), budget(24e9))
    assert (chosen.plan.keep, chosen.plan.chunk_tokens, chosen.plan.boundary_store) == ("everything", None, "device")


def test_less_memory_is_never_faster_and_what_is_chosen_fits(planner):
    row = Row(3072)
    most = planner.predict(Plan(keep="everything"), row).needed_bytes
    least = planner.smallest(row, budget(0)).needed_bytes
    seconds = 0.0
    for share in (1.0, 0.3, 0.0):
        allowed = budget(least + share * (most - least))
        chosen = planner.choose(row, allowed)
        assert chosen is not None and chosen.fits(allowed)
        assert chosen.seconds.total >= 0.999 * seconds
        seconds = chosen.seconds.total
        # What was extrapolated holds for the whole row and stack.
        if share in (0.3, 0.0):
            traced = planner.forecaster.ghost.trace(chosen.plan, row.forest())
            moving = sum(chosen.terms.get(name, 0) for name in ("kv", "boundaries", "flow", "kept", "prologue"))
            moving += sum(chosen.terms.get(name, 0) for name in ("cell", "head", "gradients"))
            assert traced.peak <= 1.001 * moving


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_some_plan_holds_is_never_refused(kind):
    """Where the head is most of a step, and slack most of what smaller chunks save: budgets close to each other."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3, vocab_size=49152)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = add_lora(model.requires_grad_(False), rank=4, alpha=8).train()
    device = CARD if kind == "cuda" else replace(CARD, kind="cpu", attention="cpu-flash")
    with Planner(model, device, process=300 << 20) as planner:
        row = Row(6000)
        least = planner.smallest(row, budget(0)).needed_bytes
        allowed = [budget(least * 1.02**step) for step in range(40)]
        assert all((found := planner.choose(row, room)) is not None and found.fits(room) for room in allowed)
        assert planner.choose(row, budget(0.5 * least)) is None


def test_where_not_all_layers_can_be_kept_the_last_ones_are(planner):
    row = Row(3072)
    everything = planner.predict(Plan(keep="everything"), row)
    attention = planner.predict(Plan(keep="attention"), row)
    least = planner.predict(Plan(keep="everything", chunk_tokens=1024, head_chunk=256), row)
    allowed = budget(min(everything.needed_bytes, least.needed_bytes) - 1)
    chosen = planner.choose(row, allowed)
    assert chosen.plan.keep == "everything" and chosen.plan.keep_layers == 4 and chosen.fits(allowed)
    assert everything.seconds.total < chosen.seconds.total < attention.seconds.total
    traced = planner.forecaster.ghost.trace(chosen.plan, row.forest())
    assert traced.peak == sum(chosen.terms.get(name, 0) for name in CLASSES)


def test_kept_layers_each_take_the_same(planner):
    row = Row(3072)
    taken = [planner.predict(Plan(keep="everything", keep_layers=n), row).terms["kept"] for n in (1, 2, 3, 4)]
    assert {b - a for a, b in itertools.pairwise(taken)} == {taken[0]}
    whole = planner.predict(Plan(keep="everything"), row)
    assert planner.predict(Plan(keep="everything", keep_layers=5), row).terms == whole.terms
    assert planner.predict(Plan(keep="everything", keep_layers=50), row).terms == whole.terms


def test_what_is_to_be_kept_is_kept_of_as_many_layers_as_fit(planner):
    row = Row(3072)
    nothing = planner.predict(Plan(chunk_tokens=1024), row).needed_bytes
    some = planner.predict(Plan(chunk_tokens=1024, keep="everything", keep_layers=2), row).needed_bytes
    fixed = {"keep": "everything", "boundary_store": "device", "chunk_tokens": 1024}
    chosen = planner.choose(row, budget(some), fixed)
    assert chosen is not None and chosen.plan == Plan(chunk_tokens=1024, keep="everything", keep_layers=2)
    assert planner.choose(row, budget(some), {**fixed, "keep_layers": 3}) is None
    assert planner.choose(row, budget(0.99 * nothing), fixed) is None
    assert planner.smallest(row, budget(0), fixed).plan.keep_layers == 1


def test_attention_is_kept_of_as_many_layers_as_the_host_holds(planner):
    row = Row(8192)
    plan = Plan(chunk_tokens=1024, boundary_store="host", keep="attention")
    full, none = (planner.predict(p, row) for p in (plan, replace(plan, keep="nothing")))
    allowed = budget(1.01 * full.needed_bytes, (full.host_bytes + none.host_bytes) // 2, 0)
    chosen = planner.choose(row, allowed)
    assert chosen.plan.keep == "attention" and 1 <= chosen.plan.keep_layers < 5 and chosen.fits(allowed)


def test_given_keys_stay_and_the_others_are_chosen(planner):
    fixed = {"chunk_tokens": 1024, "keep": "attention"}
    chosen = planner.choose(Row(4096), budget(24e9), fixed)
    assert (chosen.plan.chunk_tokens, chosen.plan.keep) == (1024, "attention")
    tight = planner.choose(Row(4096), budget(chosen.needed_bytes - 1), fixed)
    assert tight is None or (tight.plan.chunk_tokens, tight.plan.keep) == (1024, "attention")


def test_a_small_host_gets_fewer_boundaries_or_the_disk(planner):
    row = Row(3072)
    tight = planner.predict(Plan(chunk_tokens=1024, boundary_store="host"), row)
    near = budget(1.02 * tight.needed_bytes, host=tight.host_bytes // 2)
    chosen = planner.choose(row, near)
    assert chosen is not None and chosen.host_bytes <= near.host
    assert chosen.plan.boundary_store == "disk" or chosen.plan.layers_per_segment != 1
    assert planner.choose(row, budget(0.5 * tight.needed_bytes)) is None


def test_the_longest_row_fits_and_a_longer_one_does_not(planner):
    allowed = budget(CONTEXT + 300e6)
    longest = planner.largest_row(allowed)
    assert planner.smallest(Row(longest), allowed).fits(allowed)
    assert not planner.smallest(Row(longest * 11 // 10 // 1024 * 1024), allowed).fits(allowed)


def test_a_model_that_cannot_be_chunked_gets_one_chunk(planner):
    planner.unchunkable = "a layer mixes tokens outside attention"
    try:
        row = Row(3072)
        whole = planner.predict(Plan(keep="nothing"), row)
        chosen = planner.choose(row, budget(1.3 * whole.needed_bytes))
        assert chosen is not None and chosen.plan.chunk_tokens is None
    finally:
        planner.unchunkable = None


def test_terms_add_up(planner):
    found = planner.predict(Plan(chunk_tokens=1024, boundary_store="host"), Row(5000))
    inside = sum(size for name, size in found.terms.items() if name not in ("slack", "host", "disk"))
    assert inside == found.peak_bytes
    assert found.needed_bytes == found.peak_bytes + found.terms["slack"] + CONTEXT
    assert found.terms["host"] == found.host_bytes > 0
    assert found.terms["optimiser"] == 2 * found.terms["adapters"]


def test_earlier_micro_batches_leave_gradients():
    with Planner(meta_llama(layers=2), CARD, accumulate=4) as several:
        assert several.terms["gradients"] == sum(
            4 * p.numel() for p in several.forecaster.ghost.engine.model.parameters() if p.requires_grad
        )


def test_a_cpu_counts_the_process_and_its_model():
    model = add_lora(tiny_model("llama", torch.float32), rank=3, alpha=6)
    here = replace(CARD, kind="cpu", attention="cpu-flash")
    with Planner(model, here, process=10**8) as found:
        prediction = found.predict(Plan(chunk_tokens=16, boundary_store="host"), Row(64))
    assert prediction.terms["process"] == 10**8
    # The host is the device.
    assert prediction.host_bytes == 0 and prediction.terms["host"] > 0
    assert prediction.peak_bytes == sum(prediction.terms.values())


def test_longer_rows_and_recomputing_take_longer(planner):
    times = [planner.predict(Plan(chunk_tokens=2048), Row(tokens)).seconds.total for tokens in (2048, 16384, 65536)]
    assert times == sorted(times) and times[2] > 4 * times[1]
    row = Row(4096)
    everything, attention, nothing = (
        planner.predict(Plan(keep=keep), row).seconds for keep in ("everything", "attention", "nothing")
    )
    assert everything.total < attention.total < nothing.total
    assert everything.attention == attention.attention < nothing.attention


def test_pinning_and_slow_links_are_told_apart(planner):
    forecast = planner.forecaster.forecast(Plan(chunk_tokens=1024, boundary_store="host"), Row(8192))
    usual, slow = cost.seconds(forecast, CARD), cost.seconds(forecast, replace(CARD, link=1e6))
    assert usual.first == pytest.approx(forecast.away["host"] / cost.PINNING)
    assert usual.copies == 0.0 < slow.copies


def test_compiled_layers_move_less_and_compute_the_same(planner):
    forecast = planner.forecaster.forecast(Plan(chunk_tokens=2048), Row(8192))
    quick = replace(CARD, launch=0.0)
    eager, compiled = (cost.seconds(forecast, quick, compiled=value) for value in (False, True))
    assert compiled.memory < eager.memory and compiled.total < eager.total
    assert (compiled.products, compiled.attention) == (eager.products, eager.attention)
    # Where the host can't launch fast enough, nothing is promised.
    slow = replace(CARD, launch=1.0)
    assert cost.seconds(forecast, slow, compiled=True).total == pytest.approx(cost.seconds(forecast, slow).total)


@pytest.mark.parametrize(
    ("steps", "any_size", "pays"),
    [(0, False, False), (66, False, False), (67, False, True), (150, True, False), (151, True, True)],
)
def test_compiling_pays_where_it_saves_more_than_it_takes(steps, any_size, pays):
    assert cost.compiling_pays(5.8, 5.2, steps, any_size) is pays


@pytest.mark.parametrize(("rate", "seconds"), [(1e12, 2.0), (1e11, 10.0)])
def test_skinny_products_take_what_bounds_them(rate, seconds):
    # 1e12 operations, and 2e10 bytes at 1e10 a second.
    device = replace(CARD, kind="cpu", products=rate, bandwidth=1e10, launch=0.0)
    work = Work(thin_products=1e12, thin_bytes=2e10)
    assert sum(getattr(cost._phase(work, device), name) for name in ("products", "memory")) == pytest.approx(seconds)


def test_compiling_what_gets_no_faster_never_pays():
    assert not cost.compiling_pays(1.0, 1.0, 10**9)


def test_known_devices_are_found_by_name():
    assert known("H200").attention == "cudnn" and known("RTX 4090").memory > 23e9
    for name in devices.names():
        device = known(name)
        assert device.memory > 10e9 and device.products >= device.forward >= device.backward > 0
    with pytest.raises(UserError, match="h200"):
        known("abacus")


def test_this_machine_can_be_measured():
    found = devices.measure(torch.device("cpu"), torch.float32, heads=4, key_heads=2, width=16)
    assert isinstance(found, Device) and found.source == "measured" and found.attention == "cpu-flash"
    assert min(found.products, found.forward, found.backward, found.bandwidth, found.link, found.launch) > 0
    free = budget_here(torch.device("cpu"))
    assert 0 < budget_here(torch.device("cpu"), 10**9).device == 10**9 < free.device <= devices.host_memory()["total"]


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24 * 10**9), ("1.5 GiB", 3 << 29), ("900MB", 9 * 10**8), ("auto", None)]
)
def test_sizes_are_read(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["24", "GB", "-1GB", "0GB", "24 apples"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="no size"):
        memory_bytes(text)
