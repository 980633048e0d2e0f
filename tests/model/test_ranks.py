"""Rank policies: the rules on numbers, on maps as checkpoints hold them, and as patterns that PEFT reads alike."""

import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from peft.utils.other import get_pattern_key

from longtune.errors import UserError
from longtune.model.adapters import ADAPTER, add_lora, parameter_groups, save_adapter
from longtune.model.names import match_names
from longtune.model.packed.storage import remember_bits
from longtune.model.rank_sources import Figures, find_figures, lora_ranks
from longtune.model.ranks import choose_ranks, kind_of, patterns, read_sensitivities, read_widths
from support import tiny_model

NAMES = ["model.layers.0.q_proj", "model.layers.0.v_proj", "model.layers.1.q_proj", "model.layers.1.v_proj"]

# How mlx-lm's mixed_4_6 recipe stores the linears of SmolLM2-135M (30 layers): all in 4 bits but value and down
# projections of the first and last eighth and of every third layer between, which have 6.
MORE_BITS = [n for n in range(30) if n < 3 or n >= 26 or (n - 3) % 3 == 2]
LINEARS = [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
]
MIXED = {
    f"model.layers.{layer}.{linear}": 6 if layer in MORE_BITS and linear.endswith(("v_proj", "down_proj")) else 4
    for layer in range(30)
    for linear in LINEARS
}


def test_a_mixed_map_of_a_real_model():
    ranks = choose_ranks("by_bits", 8, list(MIXED), MIXED)
    assert ranks.by_name == {name: 12 if bits == 6 else 8 for name, bits in MIXED.items()}
    assert ranks.by_name["model.layers.0.mlp.down_proj"] == 12 and ranks.by_name["model.layers.3.mlp.down_proj"] == 8
    assert sum(ranks.by_name.values()) == 210 * 8 + 2 * len(MORE_BITS) * 4
    rows = {(row["module"], row["bits"]): row for row in ranks.rows()}
    assert len(rows) == 9
    assert rows["mlp.down_proj", 6]["modules"] == len(MORE_BITS) == 14
    assert rows["mlp.down_proj", 6]["rank_low"] == rows["mlp.down_proj", 6]["rank_high"] == 12
    assert rows["mlp.down_proj", 4]["modules"] == 16
    assert not ranks.notes and not ranks.even
    lines = ranks.lines()
    assert len(lines) == 10 and len({len(line) for line in lines}) == 1
    assert lines[-1].split() == ["mlp.down_proj", "4", "16", "-", "8"]
    assert choose_ranks("constant", 8, list(MIXED), MIXED).lines() == ["210 modules of rank 8"]


@pytest.mark.parametrize(
    ("rank", "bits", "expected"),
    [(8, 4, 8), (8, 8, 16), (8, 6, 12), (8, 5, 10), (8, 3, 6), (8, 2, 4), (6, 3, 5), (2, 2, 2), (1, 4, 2), (3, 1, 2)],
)
def test_by_bits_rounds_up_and_stays_at_two(rank, bits, expected):
    assert choose_ranks("by_bits", rank, ["m"], {"m": bits}).by_name == {"m": expected}


def test_a_module_that_is_missing_in_the_map_counts_as_not_quantised():
    ranks = choose_ranks("by_bits", 8, NAMES, {NAMES[0]: 8, NAMES[1]: 16, "elsewhere": 2})
    assert list(ranks.by_name.values()) == [16, 8, 8, 8]
    assert ranks.bits == {NAMES[0]: 8}


def test_by_kl_scales_by_the_median_of_the_targets_and_is_clipped():
    kl = dict(zip(NAMES, [0.001, 0.02, 0.03, 0.9], strict=True)) | {"lm_head": 50.0}
    ranks = choose_ranks("by_kl", 8, NAMES, {name: 8 for name in NAMES}, kl)
    # Median 0.025: factors 0.04 -> 0.5, 0.8, 1.2, 36 -> 2.
    assert list(ranks.by_name.values()) == [4, math.ceil(8 * 0.8), math.ceil(8 * 1.2), 16]
    assert not ranks.notes and "lm_head" not in ranks.kl


def test_a_module_without_a_figure_goes_by_bits_and_it_is_said():
    ranks = choose_ranks("by_kl", 8, NAMES, {NAMES[2]: 8}, {NAMES[0]: 0.1, NAMES[1]: 0.2})
    # Median 0.15 of the two that have one.
    assert list(ranks.by_name.values()) == [6, 11, 16, 8]
    assert "2 of 4" in ranks.notes[0] and NAMES[2] in ranks.notes[0] and NAMES[0] not in ranks.notes[0]


@pytest.mark.parametrize(("kl", "said"), [({}, "no sensitivities"), (dict.fromkeys(NAMES, 0.0), "median sensitivity")])
def test_by_kl_without_figures_falls_back_and_says_so(kl, said):
    ranks = choose_ranks("by_kl", 8, NAMES, {NAMES[0]: 8}, kl)
    assert list(ranks.by_name.values()) == [16, 8, 8, 8]
    assert said in ranks.notes[0]
    assert "no target is quantised" in choose_ranks("by_bits", 8, NAMES).notes[0]


def test_constant_needs_no_figures():
    ranks = choose_ranks("constant", 1, NAMES, {NAMES[0]: 8}, {NAMES[0]: 0.5})
    assert set(ranks.by_name.values()) == {1} and ranks.even and not ranks.notes


@given(
    rank=st.integers(1, 200),
    kl=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9),
    bits=st.integers(1, 16),
)
def test_no_policy_leaves_its_bounds(rank, kl, bits):
    names = [f"m{number}" for number in range(len(kl))]
    widths = dict.fromkeys(names, bits)
    for policy in ("by_bits", "by_kl"):
        for name, chosen in choose_ranks(
            policy, rank, names, widths, dict(zip(names, kl, strict=True))
        ).by_name.items():
            assert chosen >= 2, name
            assert min(rank / 4, rank / 2) <= chosen <= max(2, 4 * rank)


@pytest.mark.parametrize("figure", [-0.1, math.nan, math.inf])
def test_figures_that_are_none_are_named(figure):
    with pytest.raises(UserError, match=r"sensitivity of model\.layers\.0\.q_proj"):
        choose_ranks("by_kl", 8, NAMES, None, {NAMES[0]: figure})
    with pytest.raises(UserError, match="storage bits"):
        choose_ranks("by_bits", 8, NAMES, {NAMES[0]: figure})


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(UserError) as caught:
        choose_ranks("by_size", 0, NAMES, None, {NAMES[0]: -1.0})
    assert len(caught.value.problems) == 3


def test_patterns_name_each_module_alone_and_keep_the_scale():
    ranks = {"model.layers.1.q": 3, "x.model.layers.1.q": 5, "model.layers.11.q": 7, "modelxlayers.1.q": 4}
    rank_pattern, alpha_pattern = patterns(ranks, 4, 6.0, rslora=False)
    for name, rank in ranks.items():
        assert rank_pattern.get(get_pattern_key(list(rank_pattern), name), 4) == rank
        alpha = alpha_pattern.get(get_pattern_key(list(alpha_pattern), name), 6.0)
        assert alpha / rank == pytest.approx(6.0 / 4, rel=1e-15)
        matching = [key for key in rank_pattern if re.match(rf"(.*\.)?({key})$", name)]
        assert len(matching) == (rank != 4)
    assert patterns(ranks, 4, 6.0, rslora=True)[1] == {}


def test_a_shorter_name_of_another_module_is_not_hit_either():
    rank_pattern, _ = patterns({"layers.0.q": 3}, 4, 8.0, rslora=False, others=["vision.layers.0.q"])
    assert get_pattern_key(list(rank_pattern), "vision.layers.0.q") == "vision.layers.0.q"
    assert rank_pattern[get_pattern_key(list(rank_pattern), "layers.0.q")] == 3


@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "deepseek_v3", "phi3", "gpt_oss"])
@pytest.mark.parametrize("rslora", [False, True])
def test_uneven_ranks_load_in_peft_with_equal_logits(family, rslora, tmp_path):
    model = tiny_model(family, torch.float32)
    kl = {name: float(number % 7 + 1) for number, name in enumerate(dict(model.named_modules()))}
    made = add_lora(model, rank=4, alpha=6, rslora=rslora, rank_policy="by_kl", kl=kl).eval()
    generator = torch.Generator().manual_seed(0)
    ranks, scales = set(), set()
    with torch.no_grad():
        for module in made.modules():
            if hasattr(module, "lora_B") and ADAPTER in module.lora_B:
                module.lora_B[ADAPTER].weight.copy_(
                    torch.randn(module.lora_B[ADAPTER].weight.shape, generator=generator) * 0.1
                )
                ranks.add(module.r[ADAPTER])
                scales.add(module.scaling[ADAPTER])
    assert len(ranks) > 2
    assert scales == ({6 / math.sqrt(rank) for rank in ranks} if rslora else {1.5})
    save_adapter(made, tmp_path / "a")
    plain = PeftModel.from_pretrained(tiny_model(family, torch.float32), str(tmp_path / "a")).eval()
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        # PEFT adds up in another order, which four residual streams (gemma3n) show more.
        close = 4e-6 if family == "gemma3n_text" else 1e-6
        torch.testing.assert_close(plain(tokens).logits, made(tokens).logits, rtol=close, atol=close)


def test_learning_rates_of_b_and_chosen_layers_hold_with_uneven_ranks():
    model = tiny_model("llama", torch.float32)
    bits = {name: 8.0 if "v_proj" in name else 4.0 for name, _ in model.named_modules()}
    made = add_lora(model, rank=4, alpha=8, rank_policy="by_bits", bits=bits, layers="last 2")
    downs, ups = parameter_groups(made, learning_rate=1e-3, lora_plus_ratio=4)
    assert len(downs["params"]) == len(ups["params"]) == 2 * 7
    assert sorted(p.shape[0] for p in downs["params"]) == [4] * 12 + [8] * 2
    assert sorted(p.shape[1] for p in ups["params"]) == [4] * 12 + [8] * 2
    assert ups["lr"] == 4e-3


def test_figures_come_from_the_modules_and_from_the_files_beside_the_model(tmp_path):
    model = tiny_model("llama", torch.float32)
    name = "model.layers.1.mlp.down_proj"
    remember_bits(model.get_submodule(name), 6)
    assert find_figures(model, None, policy="constant") == Figures()
    assert find_figures(model, tmp_path, policy="by_bits").bits == {name: 6.0}
    (tmp_path / "optiq").mkdir()
    entries = [
        {
            "layer_name": f"language_model.{name}",
            "sensitivities": {"8": 0.001, "4": 0.25, "16": 0},
            "param_count": 1536,
        },
        {"layer_name": "vision_tower.layers.1.mlp.down_proj", "sensitivities": {"4": 9.0}},
        {"layer_name": "model.layers.0.mlp.up_proj", "sensitivities": {"2": 0.5}},
    ]
    file = tmp_path / "optiq" / "sensitivity.json"
    for whole in (entries, {"layers": entries}):
        file.write_text(json.dumps(whole))
        found = find_figures(model, tmp_path)
        assert found.kl == {name: 0.25, "model.layers.0.mlp.up_proj": 0.5} and found.kl_file == file
    assert find_figures(model, None, sensitivity=tmp_path).kl == found.kl
    ranks = lora_ranks(model, found, rank=8, policy="by_kl", targets=["down_proj", "up_proj"])
    assert ranks.by_name[name] == math.ceil(8 * 0.25 / 0.375)
    assert ranks.by_name["model.layers.3.mlp.up_proj"] == 8


def test_experts_take_the_higher_figure_of_what_mlx_keeps_apart(tmp_path):
    model = tiny_model("qwen3_moe", torch.float32)
    entries = {
        "model.layers.0.mlp.switch_mlp.gate_proj": 0.25,
        "model.layers.0.mlp.switch_mlp.up_proj": 0.5,
        "language_model.model.layers.1.mlp.switch_mlp.down_proj": 0.125,
        "model.layers.2.mlp.experts.gate_up_proj": 0.75,
    }
    listed = [{"layer_name": name, "sensitivities": {"4": kl}} for name, kl in entries.items()]
    (tmp_path / "sensitivity.json").write_text(json.dumps(listed))
    found = find_figures(model, None, sensitivity=tmp_path)
    stacks = {
        "model.layers.0.mlp.experts.gate_up_proj": 0.5,
        "model.layers.1.mlp.experts.down_proj": 0.125,
        "model.layers.2.mlp.experts.gate_up_proj": 0.75,
    }
    assert found.kl == stacks
    ranks = lora_ranks(model, found, rank=8, policy="by_kl", targets=["experts"])
    assert ranks.by_name["model.layers.1.mlp.experts.down_proj"] == 4
    assert ranks.by_name["model.layers.2.mlp.experts.gate_up_proj"] == 12


def test_widths_of_weights_that_were_dequantised_on_loading_come_from_the_metadata(tmp_path):
    model = tiny_model("llama", torch.float32)
    layers = {"model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": 64}}
    (tmp_path / "optiq_metadata.json").write_text(json.dumps({"optimization": {"per_layer": layers}}))
    assert find_figures(model, tmp_path, policy="by_bits").bits == {"model.layers.0.self_attn.q_proj": 8.0}


@pytest.mark.parametrize(
    "text",
    ["", "[]x", "3", '{"layers": 3}', '[{"layer_name": "a"}]', '[{"sensitivities": {}, "layer_name": "a"}]', "[4]"],
)
def test_files_that_are_no_sensitivities_are_named(text, tmp_path):
    file = tmp_path / "kl.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"kl\.json"):
        read_sensitivities(file)
    file.write_text('{"per_layer": [1]}')
    with pytest.raises(UserError, match=r"kl\.json"):
        read_widths(file)


def test_sensitivities_of_another_model_or_of_nowhere_are_refused(tmp_path):
    model = tiny_model("llama", torch.float32)
    with pytest.raises(UserError, match="no such file"):
        find_figures(model, None, sensitivity=tmp_path / "none.json")
    with pytest.raises(UserError, match=r"holds no sensitivity\.json"):
        find_figures(model, None, sensitivity=tmp_path)
    (tmp_path / "kl.json").write_text('[{"layer_name": "model.layers.9.q_proj", "sensitivities": {"4": 1}}]')
    with pytest.raises(UserError, match="names no linear"):
        find_figures(model, None, sensitivity=tmp_path / "kl.json")


def test_names_are_never_guessed():
    ours = ["a.layers.0.q", "b.layers.0.q", "a.layers.1.q", "head"]
    assert match_names(["x.layers.0.q", "x.layers.1.q", "head", "tail"], ours) == {
        "x.layers.1.q": ours[2],
        "head": "head",
    }
    assert match_names(["x.layers.1.q", "y.layers.1.q"], ours) == {}
    assert match_names(["x.layers.1.q", "a.layers.1.q"], ours) == {"a.layers.1.q": "a.layers.1.q"}


def test_kinds_leave_out_the_layer_alone():
    assert kind_of("model.layers.12.self_attn.q_proj") == "self_attn.q_proj"
    assert kind_of("model.layers.1.mlp.experts.3.up_proj") == "mlp.experts.3.up_proj"
    assert kind_of("lm_head") == "lm_head"


def test_a_rank_that_no_module_can_use_is_refused_and_one_that_some_can_not_is_told():
    model = tiny_model("llama", torch.float32)  # 32 wide, MLP 48, keys and values 16.
    assert not lora_ranks(model, Figures(), rank=16, policy="constant").notes
    (note,) = lora_ranks(model, Figures(), rank=32, policy="constant").notes
    assert "k_proj 16" in note and "v_proj 16" in note and "q_proj" not in note and "layers" not in note
    for rank, targets, most in ((33, "all-linear", 32), (17, ["k_proj"], 16), (10**6, "all-linear", 32)):
        with pytest.raises(UserError, match=f"{most} at most") as caught:
            lora_ranks(model, Figures(), rank=rank, policy="constant", targets=targets)
        assert caught.value.problems[0].fix == f"set it to {most} or less"
        lora_ranks(model, Figures(), rank=most, policy="constant", targets=targets)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_the_highest_rank_of_any_kind_of_weight_is_known(family):
    model = tiny_model(family, torch.float32)
    targets = ["all-linear"] + (["experts"] if family == "mixtral" else [])
    with pytest.raises(UserError, match="32 at most"):
        lora_ranks(model, Figures(), rank=1000, policy="constant", targets=targets)
