"""Traces and forecasts: bytes of a ghost are those of the real walk, and long rows are extrapolated rightly."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtune.attention import merge as merging
from longtune.attention.kernels import Reference
from longtune.attention.path import PathAttention, Score
from longtune.attention.store import KVStore
from longtune.engine import Engine, Plan
from longtune.engine.forecast import Forecaster, Row
from longtune.engine.meter import CLASSES, Meter
from longtune.engine.standins import MergeStandin, Watch, seen_pairs
from longtune.engine.trace import Ghost, ghost_of, stored_bytes
from longtune.engine.unread import NOTHING
from longtune.model.adapters import add_lora
from longtune.objective import get
from longtune.tree import Forest
from tests.support import ARCHITECTURES, pair_tree, random_sequence, tiny_model

MIXTURES = ("gpt_oss", "qwen3_moe", "deepseek_v3")
"""What their experts get is assumed to be equal shares."""


class Counter(TorchDispatchMode):
    """The oracle: live bytes of real storages that operations make."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        known = self._seen.get(key)
        if known is not None and known() is not None:
            return

        def died(_):
            self.live -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, died)
        self.live += size
        self.peak = max(self.peak, self.live)


def lora(name, **changes):
    model = add_lora(tiny_model(name, torch.float32, **changes), rank=3, alpha=6)
    return model.train()


def real_peak(model, plan, forest):
    engine, objective = Engine(model, plan), get("sft")
    assert engine.unread  # Learnt before anything is counted.
    with Counter() as counter:
        engine.accumulate(forest, objective, objective.totals(forest))
    engine.close()
    for parameter in model.parameters():
        parameter.grad = None
    return counter.peak


def ghost_peak(model, plan, forest):
    ghost = Ghost(model, "cpu-flash", "cpu")
    ghost.grain = 1
    traced = ghost.trace(plan, forest)
    ghost.close()
    return traced.peak


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_ghost_takes_what_the_walk_takes(name):
    model, plan = lora(name), Plan(chunk_tokens=32)
    forest = Forest([random_sequence(120)])
    wanted, found = real_peak(model, plan, forest), ghost_peak(model, plan, forest)
    tolerance = 0.25 if name in MIXTURES else 0.04
    assert found == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize(
    "keys",
    [
        dict(keep="everything"),
        dict(keep="everything", chunk_tokens=32),
        dict(keep="attention", chunk_tokens=32),
        dict(keep="kv", chunk_tokens=32),
        dict(layers_per_segment=None, chunk_tokens=32),
        dict(layers_per_segment=3, chunk_tokens=32, head_chunk=8),
    ],
    ids=str,
)
def test_a_ghost_takes_what_any_plan_takes(keys):
    model, plan = lora("llama"), Plan(**keys)
    forest = Forest([pair_tree(100, (41, 23)), random_sequence(30)])
    assert ghost_peak(model, plan, forest) == pytest.approx(real_peak(model, plan, forest), rel=0.04)


def test_bytes_off_the_device_are_the_boundaries():
    model = lora("llama")
    ghost = Ghost(model, "cpu-flash", "cpu")
    plan = Plan(chunk_tokens=16, boundary_store="host")
    traced = ghost.trace(plan, Forest([random_sequence(128)]))
    residual = 128 * 32 * 4
    # One boundary for each of four layers, and the flow behind the last.
    assert 4 * residual <= traced.away["host"] <= 5.2 * residual
    assert "host" not in ghost.trace(Plan(chunk_tokens=16), Forest([random_sequence(128)])).away
    ghost.close()


def test_a_ghost_leaves_the_model_alone():
    model = lora("llama")
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    ghost = Ghost(model, "cpu-flash", "cpu")
    ghost.trace(Plan(), Forest([random_sequence(20)]))
    ghost.close()
    for name, parameter in model.named_parameters():
        assert before[name] == (parameter, parameter.data_ptr())
        assert parameter.grad is None and not parameter.is_meta


def test_tied_weights_stay_tied_in_a_copy():
    model = tiny_model("llama", torch.float32, tie_word_embeddings=True)
    copy = ghost_of(model)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in copy.parameters())
    assert stored_bytes(list(copy.parameters()), 1) == stored_bytes(list(model.parameters()), 1)


def test_a_meter_counts_storages_not_tensors():
    with Meter(512, "cuda", {}) as meter:
        meter.begin("layer")
        x = torch.empty(100, 10, device="meta")
        y = x.t().reshape(1000)[2:]
        assert meter.live == 2 * 4096  # 4,000 bytes each, in grains of 512.
        z = x[3:].view(-1)
        del x
        assert meter.live == 2 * 4096
        del y, z
        assert meter.live == 0
    meter.begin("rest")
    assert meter.slots[-2].peak == 2 * 4096


def test_every_byte_has_a_class():
    model = lora("gemma4_text")
    ghost = Ghost(model, "cpu-flash", "cpu")
    traced = ghost.trace(Plan(chunk_tokens=16), Forest([random_sequence(64)]))
    ghost.close()
    for slot in traced.slots:
        assert set(slot.bytes) <= set(CLASSES)
        assert all(size >= 0 for size in slot.bytes.values())
        assert sum(slot.bytes.values()) == max(slot.peak, 0)
    assert {slot.phase[0] for slot in traced.slots} >= {"prologue", "forward", "head", "backward"}


@pytest.mark.parametrize("kernel", ["cudnn", "cuda-flash"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_a_gpu_that_is_not_there_can_be_stood_for(name, kernel):
    model = add_lora(tiny_model(name, torch.bfloat16), rank=3, alpha=6)
    ghost = Ghost(model, kernel, "cuda")
    for forest in (Forest([random_sequence(100)]), Forest([pair_tree(40, (9, 8)), pair_tree(30, (7, 5), seed=1)])):
        for plan in (Plan(keep="everything"), Plan(chunk_tokens=16, boundary_store="host")):
            traced = ghost.trace(plan, forest, one_pass=False)
            assert traced.peak > 0
            assert sum(slot.work.forward for slot in traced.slots) > 0
            assert sum(slot.work.backward for slot in traced.slots) > 0
    ghost.close()


@pytest.mark.parametrize(
    ("name", "layers", "changes", "plans"),
    [
        (
            "llama",
            7,
            {},
            [
                dict(keep="attention", boundary_store="host"),
                dict(keep="everything"),
                dict(layers_per_segment=2),
            ],
        ),
        (
            "llama",
            9,
            {},
            [
                dict(keep="everything", keep_layers=4, boundary_store="host"),
                dict(keep="everything", keep_layers=2, layers_per_segment=2),
                dict(keep="attention", keep_layers=4, layers_per_segment=2, boundary_store="host"),
            ],
        ),
        (
            "gemma3_text",
            12,
            dict(layer_types=["sliding_attention", "full_attention"] * 6),
            [{}, dict(keep="everything", keep_layers=3)],
        ),
    ],
    ids=["llama", "llama of two parts", "gemma3"],
)
def test_long_rows_and_deep_stacks_are_extrapolated_to_what_they_take(name, layers, changes, plans):
    model = lora(name, num_hidden_layers=layers, **changes)
    ghost = Ghost(model, "cpu-flash", "cpu")
    ghost.engine.port.attention.block_keys = 32
    forecaster = Forecaster(ghost)
    assert forecaster.period == (1 if name == "llama" else 2)
    row = Row(16 * 11 + 5)
    for keys in plans:
        plan = Plan(chunk_tokens=16, **keys)
        forecast = forecaster.forecast(plan, row)
        traced = ghost.trace(plan, row.forest())
        assert forecast.peak == pytest.approx(traced.peak, rel=0.01), keys
        assert forecast.peak >= 0.999 * traced.peak, keys
        assert forecast.away["host"] == traced.away.get("host", 0), keys
        for field in ("products", "thin_bytes", "forward", "backward", "launches"):
            whole = sum(getattr(slot.work, field) for slot in traced.slots if slot.phase[0] != "deliver")
            found = sum(getattr(work, field) for work in forecast.work.values())
            tolerance = 0.06 if field == "launches" else 0.02
            assert found == pytest.approx(whole, rel=tolerance), (keys, field)
    forecaster.close()


def test_a_stack_whose_layers_share_keys_is_traced_whole():
    model = lora("gemma4_text")
    forecaster = Forecaster(Ghost(model, "cpu-flash", "cpu"))
    assert forecaster.period is None
    plan, row = Plan(chunk_tokens=16), Row(40)
    assert forecaster.forecast(plan, row).peak == forecaster.ghost.trace(plan, row.forest()).peak
    forecaster.close()


class _Tritons:
    """Triton's kernels in place of the CPU's, on the real model (by the interpreter) and on its ghost."""

    def __init__(self, monkeypatch):
        from longtune.attention.triton_path import TritonPath

        monkeypatch.setattr(Ghost, "_path_kernels", lambda self: [TritonPath(always=True)])

    def peaks(self, model, plan, forest):
        engine, objective = Engine(model, plan, attention="triton"), get("sft")
        assert engine.unread
        with Counter() as counter:
            engine.accumulate(forest, objective, objective.totals(forest))
        engine.close()
        for parameter in model.parameters():
            parameter.grad = None
        ghost = Ghost(model, "triton", "cpu")
        ghost.grain = 1
        traced = ghost.trace(plan, forest)
        ghost.close()
        return counter.peak, traced.peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreter")
def test_what_stands_for_triton_takes_what_it_takes(monkeypatch):
    pytest.importorskip("triton")
    model = lora("llama", num_hidden_layers=2)
    forest = Forest([random_sequence(20), pair_tree(20, (9, 8))])
    real, ghost = _Tritons(monkeypatch).peaks(model, Plan(chunk_tokens=24), forest)
    assert ghost == pytest.approx(real, rel=0.04)


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreter")
@pytest.mark.parametrize("tokens", [16, 17, 24, 64])
def test_what_stands_for_merging_takes_and_moves_what_it_does(tokens, monkeypatch):
    """One block of the past and several, two heads of 16 to one of keys; a chunk of 8, blocks of 8 to 32."""
    pytest.importorskip("triton")
    monkeypatch.setattr(merging, "FEW", 0)
    chunk = Forest([random_sequence(tokens)]).chunks(8)[-1]
    store = KVStore(tokens)
    keys = torch.randn(1, 1, tokens, 16, dtype=torch.float16)
    for written in Forest([random_sequence(tokens)]).chunks(8):
        store.write(written, keys[:, :, written.start : written.end], keys[:, :, written.start : written.end])
    watch, moved = Watch(), []
    watch.count = lambda work: moved.append(work.moved)
    peaks = []
    for merge in (merging.merge_fused, MergeStandin(watch)):
        attention = PathAttention(Reference(), Reference(), block_keys=8, merge=merge)
        with Counter() as counter:
            out, _ = attention.forward(torch.randn(1, 2, chunk.size, 16).half(), store, chunk, Score(0.25))
        assert out.dtype == torch.float16
        peaks.append(counter.peak)
    assert peaks[0] == peaks[1] and len(moved) >= 1
    # Two outputs of two bytes read and one written, at least, and three log-sum-exps.
    assert min(moved) >= 2 * chunk.size * (16 * 3 * 2 + 3 * 4)


def test_on_a_gpu_blocks_are_merged_in_one_pass(monkeypatch):
    """What a chunk of a long row moves is less by what torch's operations would have moved."""
    model = lora("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    forest, plan = Forest([random_sequence(5 * 8192)]), Plan(chunk_tokens=8192)

    def moved() -> float:
        ghost = Ghost(model, "cudnn", "cuda")
        traced = ghost.trace(plan, forest)
        ghost.close()
        return sum(slot.work.moved for slot in traced.slots)

    fused = moved()
    monkeypatch.setattr(Ghost, "_merges", lambda self: False)
    assert fused < moved()


def brute_pairs(chunk, window):
    total = 0
    for span in chunk.spans:
        for query in range(span.position, span.position + span.end - span.start):
            total += min(query + 1, window or query + 1)
    return total


@pytest.mark.parametrize("window", [None, 1, 7, 30, 1000])
def test_pairs_are_counted_exactly(window):
    forest = Forest([random_sequence(33), pair_tree(40, (9, 8)), random_sequence(1)])
    for size in (1, 10, None):
        for chunk in forest.chunks(size):
            assert seen_pairs(chunk, window) == brute_pairs(chunk, window)


def attention_work(model, forest, kernel="cudnn", plan=None):
    ghost = Ghost(model, kernel, "cuda")
    traced = ghost.trace(plan or Plan(), forest)
    ghost.close()
    return sum(slot.work.forward for slot in traced.slots), traced.peak


def test_a_windows_work_on_a_gpu_is_proportional_to_the_window():
    def model(window):
        kinds = dict(layer_types=["sliding_attention"] * 2, num_hidden_layers=2, head_dim=64, sliding_window=window)
        return add_lora(tiny_model("gemma3_text", torch.bfloat16, **kinds), rank=3, alpha=6).train()

    forest = Forest([random_sequence(9000)])
    narrow, wide = (attention_work(model(window), forest)[0] for window in (1024, 4096))
    # 700 keys are what a query costs besides (`standins._WHOLE`); the first queries see less than a window.
    wanted = [window * (9000 - window / 2) + 700 * 9000 for window in (1024, 4096)]
    assert narrow / wide == pytest.approx(wanted[0] / wanted[1], rel=0.01)
    # What is not cut by the window stays with the blocks.
    short = Forest([random_sequence(512)])
    assert attention_work(model(1024), short)[0] == attention_work(model(4096), short)[0]


def test_packed_short_rows_are_one_launch_on_a_gpu():
    model = add_lora(tiny_model("llama", torch.bfloat16), rank=3, alpha=6).train()
    forest = Forest([random_sequence(50, seed=i) for i in range(40)])
    ghost = Ghost(model, "cudnn", "cuda")
    many, one = (
        sum(slot.work.launches for slot in ghost.trace(Plan(keep="everything"), row).slots)
        for row in (forest, Forest([random_sequence(2048)]))
    )
    ghost.close()
    assert many < 1.1 * one


def test_long_packed_rows_are_extrapolated_to_what_they_take():
    model = lora("llama", num_hidden_layers=5)
    ghost = Ghost(model, "cpu-flash", "cpu")
    ghost.engine.port.attention.block_keys = 16
    forecaster = Forecaster(ghost)
    plan = Plan(chunk_tokens=16)
    for length, count in ((12, 40), (40, 12), (600, 2)):
        forest = Forest([random_sequence(length, seed=i) for i in range(count)])
        row = Row.of(forest)
        assert row.length == length and Row.of(row.forest()).length == length
        forecast, traced = forecaster.forecast(plan, forest), ghost.trace(plan, forest)
        assert forecast.traces == 4
        assert 0.98 * traced.peak <= forecast.peak <= 1.2 * traced.peak, length
        for field, tolerance in (("forward", 0.05), ("backward", 0.05), ("thin_bytes", 0.05)):
            whole = sum(getattr(slot.work, field) for slot in traced.slots if slot.phase[0] != "deliver")
            found = sum(getattr(work, field) for work in forecast.work.values())
            assert found == pytest.approx(whole, rel=tolerance), (length, field)
    forecaster.close()


def test_a_recomputed_cell_leaves_out_what_nobody_reads():
    model = lora("llama", num_hidden_layers=2)
    ghost = Ghost(model, "cpu-flash", "cpu")
    forest = Forest([random_sequence(64)])

    def recomputed():
        slots = ghost.trace(Plan(), forest).slots
        return sum(slot.work.launches for slot in slots if slot.phase[0] == "backward")

    less = recomputed()
    assert all(unread.fresh for unread in ghost.engine.unread)
    ghost.engine.unread = (NOTHING,) * 2
    assert recomputed() > less
    ghost.close()


def test_a_shorter_ghost_knows_what_the_whole_one_does():
    ghost = Ghost(lora("llama"), "cpu-flash", "cpu")
    short = ghost.short(2)
    slots = short.trace(Plan(), Forest([random_sequence(20)])).slots
    assert sum(slot.what == "layer" for slot in slots) == 4
    assert short.engine.unread == ghost.engine.unread[:2]
    for one in (ghost, short):
        one.close()
