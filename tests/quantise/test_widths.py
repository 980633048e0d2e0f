"""Which modules get the high width, and what a choice weighs."""

from __future__ import annotations

import pytest
import torch

from longtune.errors import UserError
from longtune.model.packed import Format
from longtune.quantise import choose_widths, find_units, uniform_widths
from longtune.quantise.widths import Plain, packed_bits
from tests.support import tiny_model

LOW, HIGH = Format("affine", 4, 16), Format("affine", 8, 16)
NOTHING = Plain(0, 0)


@pytest.fixture
def units():
    return find_units(tiny_model("llama", torch.float32, num_hidden_layers=1), 16)[0]


def figures(units, **given):
    return {unit.name: {4: given.get(unit.name.rpartition(".")[2], 1e-6)} for unit in units}


def test_bits_are_those_of_the_tensors(units):
    for unit in units:
        for format in (LOW, Format("affine", 3, 8), Format("mxfp4", 4, 32)):
            if unit.shape[-1] % format.group_size:
                continue
            made = unit.quantised(format)
            size = sum(x.numel() * x.itemsize for x in (made.weight, made.scales, made.biases) if x is not None)
            assert packed_bits(unit, format, 32) == 8 * size


def test_more_bits_go_where_they_gain_most_for_their_size(units):
    small = next(unit for unit in units if unit.name.endswith("k_proj"))
    large = next(unit for unit in units if unit.name.endswith("up_proj"))
    target = uniform_widths(units, LOW, NOTHING, 16).bits_per_weight
    numbers = sum(unit.numbers for unit in units)
    room = (packed_bits(large, HIGH, 16) - packed_bits(large, LOW, 16)) / numbers
    # Gain per byte: the small one's is higher, though its figure is lower.
    kl = figures(units, k_proj=0.9, up_proj=1.0)
    chosen = choose_widths(units, [LOW, HIGH], target + room, kl, NOTHING, 16)
    assert chosen.formats[small.name] == HIGH and chosen.formats[large.name] == LOW
    # What is left goes to smaller ones.
    assert target < chosen.bits_per_weight <= target + room


def test_a_figure_at_the_high_width_is_subtracted(units):
    """Raising k_proj would save nothing, by its own figures."""
    kl = figures(units, k_proj=1.0, v_proj=0.9)
    room = uniform_widths(units, LOW, NOTHING, 16).bits_per_weight
    small = next(unit for unit in units if unit.name.endswith("k_proj"))
    room += (packed_bits(small, HIGH, 16) - packed_bits(small, LOW, 16)) / sum(unit.numbers for unit in units)

    def raised() -> list[str]:
        chosen = choose_widths(units, [LOW, HIGH], room, kl, NOTHING, 16)
        return [name.rpartition(".")[2] for name, format in chosen.formats.items() if format == HIGH]

    assert raised() == ["k_proj"]
    kl["model.layers.0.self_attn.k_proj"][8] = 0.99
    assert raised() == ["v_proj"]


def test_several_widths_are_taken_step_by_step(units):
    formats = [Format("affine", bits, 16) for bits in (4, 5, 6, 8)]
    kl = figures(units, **{"q_proj": 1.0, "o_proj": 0.01})
    lowest = uniform_widths(units, LOW, NOTHING, 16).bits_per_weight
    seen = []
    for more in (0.2, 0.4, 0.6, 1.0, 2.0, 99.0):
        chosen = choose_widths(units, formats, lowest + more, kl, NOTHING, 16)
        assert lowest < chosen.bits_per_weight <= lowest + more
        by_end = {name.rpartition(".")[2]: format.bits for name, format in chosen.formats.items()}
        assert by_end["q_proj"] >= by_end["o_proj"] >= by_end["lm_head"]
        seen.append((by_end["q_proj"], by_end["o_proj"]))
    assert seen[-1] == (8, 8) and seen == sorted(seen) and len(set(seen)) > 2


def test_room_for_everything_is_said(units):
    chosen = choose_widths(units, [LOW, HIGH], 99, figures(units), NOTHING, 16)
    assert set(chosen.formats.values()) == {HIGH}
    assert "every module fits at 8 bits" in chosen.notes[0]


def test_plain_tensors_weigh_too(units):
    plain = Plain(1000, 32000)
    with_plain = uniform_widths(units, LOW, plain, 16).bits_per_weight
    numbers = sum(unit.numbers for unit in units)
    alone = uniform_widths(units, LOW, NOTHING, 16).bits_per_weight
    assert with_plain == pytest.approx((alone * numbers + 32000) / (numbers + 1000))


def test_a_target_that_the_low_width_passes_is_refused(units):
    lowest = uniform_widths(units, LOW, NOTHING, 16).bits_per_weight
    with pytest.raises(UserError, match=r"at 4 bits everywhere the model takes 6\.000") as found:
        choose_widths(units, [LOW, HIGH], lowest - 0.01, figures(units), NOTHING, 16)
    assert found.value.problems[0].fix.startswith("use at least 6")
    assert choose_widths(units, [LOW, HIGH], lowest, figures(units), NOTHING, 16).bits_per_weight == lowest


def test_a_unit_without_a_figure_is_named(units):
    kl = figures(units)
    del kl["model.layers.0.self_attn.v_proj"]
    kl["lm_head"] = {8: 0.1}
    with pytest.raises(UserError, match=r"no figure at 4 bits for model\.layers\.0\.self_attn\.v_proj, lm_head"):
        choose_widths(units, [LOW, HIGH], 8, kl, NOTHING, 16)
