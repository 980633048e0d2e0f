"""The figure of a module is the KL divergence that plain forwards of whole models give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from longtune.errors import UserError
from longtune.model.packed import Format
from longtune.model.packed.modules import PackedWeight
from longtune.model.packed.quantiser import quantise
from longtune.quantise import find_units, measure, samples_of
from longtune.quantise import sensitivity as room
from longtune.quantise.sensitivity import Sample, digest_of, divergence
from longtune.tree import Node, Targets, Tree
from tests.support import clone, tiny_model

FORMAT = Format("affine", 3, 16)


def samples(count: int = 2) -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        tokens = torch.randint(3, 97, (20 + 7 * number,), generator=draw)
        made.append(Sample(tokens, torch.arange(3, tokens.numel() - 1)))
    return made


def log_probs(model: nn.Module, rows: list[Sample]) -> torch.Tensor:
    with torch.no_grad():
        parts = [model(input_ids=row.tokens[None], use_cache=False).logits[0, row.positions] for row in rows]
    return torch.log_softmax(torch.cat(parts).double(), -1)


def kl(model: nn.Module, changed: nn.Module, rows: list[Sample]) -> float:
    plain, other = log_probs(model, rows), log_probs(changed, rows)
    return float((plain.exp() * (plain - other)).sum(-1).mean())


def rounded(weight: torch.Tensor) -> torch.Tensor:
    made = quantise(weight, FORMAT)
    packed = PackedWeight(FORMAT, weight.shape[-1], made.weight, made.scales, made.biases, compute_dtype=weight.dtype)
    return packed.dequantise()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gemma4_text"])
def test_a_figure_is_the_kl_of_whole_forwards(name, monkeypatch):
    model = tiny_model(name, torch.float32, tie_word_embeddings=name == "gemma2")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    units, _ = find_units(model, 16)
    chosen = [unit for unit in units if not 0 < unit.layer < 3 or "down_proj" in unit.name][:12]
    rows = samples()
    jobs = [(unit, FORMAT) for unit in chosen]
    figures = measure(model, rows, jobs, head_chunk=7)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    # Where the plain log-probs are too large to keep, they are made again.
    monkeypatch.setattr(room, "_KEPT_BYTES", 0)
    again = measure(model, rows, jobs, head_chunk=7)
    for unit, figure, other in zip(chosen, figures, again, strict=True):
        changed = clone(model)
        twin = next(found for found in find_units(changed, 16)[0] if found.name == unit.name)
        with torch.no_grad():
            twin.weight.copy_(rounded(unit.weight))
        truth = kl(model, changed, rows)
        assert figure == pytest.approx(truth, rel=1e-3, abs=1e-7), unit.name
        assert other == pytest.approx(figure, rel=1e-3, abs=1e-7), unit.name
        assert figure > 0
    assert any(unit.layer == -1 for unit in chosen)


def test_shared_keys_and_values_reach_their_readers():
    """Gemma 3n's last layers read an earlier layer's keys: their modules start from there."""
    model = tiny_model("gemma3n_text", torch.float32)
    units, _ = find_units(model, 16)
    chosen = [unit for unit in units if unit.layer >= 4 and "q_proj" in unit.name]
    assert chosen
    rows = samples(1)
    for unit, figure in zip(chosen, measure(model, rows, [(unit, FORMAT) for unit in chosen]), strict=True):
        changed = clone(model)
        twin = next(found for found in find_units(changed, 16)[0] if found.name == unit.name)
        with torch.no_grad():
            twin.weight.copy_(rounded(unit.weight))
        assert figure == pytest.approx(kl(model, changed, rows), rel=1e-3, abs=1e-7)


def test_the_units_of_a_model():
    model = tiny_model("llama", torch.float32)
    units, left = find_units(model, 32)
    assert [unit.layer for unit in units] == [-1, *[layer for layer in range(4) for _ in range(6)], 4]
    assert left == {
        f"model.layers.{layer}.mlp.down_proj": "groups of 32 don't divide its rows of 48" for layer in range(4)
    }
    tied, _ = find_units(tiny_model("llama", torch.float32, tie_word_embeddings=True), 16)
    assert [unit.name for unit in tied][-1] == "model.layers.3.mlp.down_proj"


def test_experts_are_units_by_mlx_names():
    units, _ = find_units(tiny_model("qwen3_moe", torch.float32), 8)
    stacks = {unit.name: unit.shape for unit in units if ".0.mlp" in unit.name}
    assert stacks == {
        "model.layers.0.mlp.switch_mlp.gate_proj": (4, 24, 32),
        "model.layers.0.mlp.switch_mlp.up_proj": (4, 24, 32),
        "model.layers.0.mlp.switch_mlp.down_proj": (4, 32, 24),
    }


def test_models_that_can_not_be_quantised():
    with pytest.raises(UserError, match="experts are laid out"):
        find_units(tiny_model("gpt_oss", torch.float32), 16)
    model = tiny_model("llama", torch.float32)
    from tests.model.packed.support import packed_linear

    model.model.layers[1].mlp.up_proj = packed_linear(48, 32)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj: is quantised already"):
        find_units(model, 16)
    with torch.no_grad():
        broken = tiny_model("llama", torch.float32)
        broken.model.layers[0].self_attn.q_proj.weight[0, 0] = float("nan")
    unit = next(unit for unit in find_units(broken, 16)[0] if "q_proj" in unit.name)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj: holds values that are not finite"):
        unit.quantised(FORMAT)
    with pytest.raises(UserError, match="not finite"):
        measure(broken, samples(), [])


def test_a_unit_is_put_back_after_an_error():
    model = tiny_model("llama", torch.float32)
    unit = find_units(model, 16)[0][3]
    before = unit.weight.clone()
    with pytest.raises(ZeroDivisionError), unit.exchanged(FORMAT):
        assert not torch.equal(unit.weight, before)
        raise ZeroDivisionError
    assert torch.equal(unit.weight, before)


def test_the_divergence_of_a_model_from_itself_is_zero():
    model = tiny_model("llama", torch.float32)
    assert divergence(model, samples(), copy.deepcopy) == 0


def test_the_divergence_of_a_changed_model():
    model = tiny_model("llama", torch.float32)
    changed = clone(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.ndim == 2:
                parameter.copy_(rounded(parameter))
    assert divergence(model, samples(), lambda _: changed) == pytest.approx(kl(model, changed, samples()), rel=1e-4)


def trees(count: int = 5) -> list[Tree]:
    return [Tree.sequence(torch.arange(10 + number) + number, row=f"rows:{number}") for number in range(count)]


def test_samples_are_drawn_up_to_a_number_of_tokens():
    drawn = samples_of(trees(), tokens=25, row_tokens=8)
    assert [sample.tokens.numel() for sample in drawn] == [8, 8, 8]
    assert all(sample.positions.tolist() == list(range(8)) for sample in drawn)
    everything = samples_of(trees(), tokens=1000, row_tokens=1000)
    assert sorted(sample.tokens.numel() for sample in everything) == [10, 11, 12, 13, 14]
    assert digest_of(drawn) == digest_of(samples_of(trees(), tokens=25, row_tokens=8))
    assert digest_of(samples_of(trees(), tokens=25, row_tokens=8, seed=1)) != digest_of(drawn)


def test_predictions_are_compared_where_rows_are_trained():
    tree = Tree.sequence(torch.arange(3, 13), weights=[0, 0, 0, 0, 1, 1, 0, 0, 0, 1])
    (sample,) = samples_of([tree], tokens=100, row_tokens=8)
    assert sample.positions.tolist() == [3, 4]


def test_data_that_can_not_be_measured_on():
    untrained = Tree.sequence(torch.arange(3, 13), weights=[0] * 9 + [1])
    with pytest.raises(UserError, match="no row has a trained token"):
        samples_of([untrained], tokens=100, row_tokens=5)
    pair = Tree((Node(torch.arange(3)), Node(torch.arange(2), 0)), Targets.of([2], [0]))
    with pytest.raises(UserError, match="pair of answers"):
        samples_of([pair], tokens=100, row_tokens=5)
    with pytest.raises(UserError, match="no row"):
        samples_of([], tokens=100, row_tokens=5)
