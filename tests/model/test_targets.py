"""Which linears are targets: sensible on every family, and every mistake named."""

import pytest

from longtune.errors import UserError
from longtune.model.targets import choose_targets, decoder_layers, left_out, shortest_patterns, unnameable
from support import ARCHITECTURES, tiny_model


def ends(names):
    """The names without the list of layers and the number."""
    return {name.split(".layers.", 1)[1].split(".", 1)[1] for name in names}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_all_linear_stays_inside_the_layers(family):
    model = tiny_model(family)
    prefix, count = decoder_layers(model)
    names = choose_targets(model)
    assert names and all(name.startswith(f"{prefix}.") for name in names)
    assert {int(name[len(prefix) + 1 :].split(".")[0]) for name in names} == set(range(count))
    assert not any("lm_head" in name or "per_layer_model_projection" in name for name in names)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gpt_oss", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("qwen3_moe", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("phi3", {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}),
    ],
)
def test_routers_and_experts_are_not_targets_and_fused_projections_are(family, expected):
    assert ends(choose_targets(tiny_model(family))) == expected


def test_latent_attention_is_targeted_whole():
    projections = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert ends(choose_targets(tiny_model("deepseek_v3"))) == {f"self_attn.{name}" for name in projections}


def test_linears_that_peft_would_take_for_experts_are_left_out_or_refused():
    assert unnameable(tiny_model("deepseek_v3")) == {"gate_proj", "up_proj", "down_proj"}
    assert not unnameable(tiny_model("llama"))
    with pytest.raises(UserError, match="PEFT takes up_proj for experts"):
        choose_targets(tiny_model("deepseek_v3"), ["q_a_proj", "up_proj"])


def test_what_all_linear_leaves_out_is_said():
    linears, experts = left_out(tiny_model("deepseek_v3"))
    # A dense MLP in the first layer, shared experts in the other three: three linears each.
    assert linears.startswith("12 linears of dense and shared MLPs (down_proj, gate_proj, up_proj) get no adapter")
    assert experts.startswith("experts get no adapter: their weights are 6 stacked tensors")
    (experts,) = left_out(tiny_model("qwen3_moe"), ["all-linear", "q_proj"])
    assert "8 stacked tensors" in experts and experts.endswith("(to adapt them: lora.targets [all-linear, experts])")
    assert not left_out(tiny_model("qwen3_moe"), ["all-linear", "experts"])
    (experts,) = left_out(tiny_model("qwen3_moe"), ["all-linear", "down_proj", "(no expression"])
    assert "4 stacked tensors" in experts
    assert left_out(tiny_model("llama")) == [] == left_out(tiny_model("qwen3_moe"), ["q_proj"])


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("experts", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ("mlp.experts", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ("experts.down_proj", {"mlp.experts.down_proj"}),
        ("gate_up_proj", {"mlp.experts.gate_up_proj"}),
        (r".*experts.*", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
    ],
)
def test_experts_are_meant_by_their_module_or_tensor(pattern, found):
    model = tiny_model("qwen3_moe")
    assert ends(choose_targets(model, [pattern])) == found
    last = choose_targets(model, ["all-linear", pattern], layers="last 1")
    assert {int(name.split(".")[2]) for name in last} == {3} and found < ends(last)
    assert not found & ends(choose_targets(model, ["all-linear"]))


def test_a_name_that_means_linears_and_experts_is_refused_where_peft_would_mix_them_up():
    with pytest.raises(UserError, match="PEFT takes down_proj for experts"):
        choose_targets(tiny_model("deepseek_v3"), ["down_proj"])
    assert ends(choose_targets(tiny_model("deepseek_v3"), ["experts.down_proj"])) == {"mlp.experts.down_proj"}


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_have_no_key_projection_to_adapt(family):
    model = tiny_model(family)
    first_sharer = model.config.num_hidden_layers - model.config.num_kv_shared_layers
    keys = {int(name.split(".layers.")[1].split(".")[0]) for name in choose_targets(model, ["k_proj"])}
    modules = dict(model.named_modules())
    assert keys == {
        number
        for number in range(model.config.num_hidden_layers)
        if f"model.layers.{number}.self_attn.k_proj" in modules
    }
    assert keys >= set(range(first_sharer))


def test_suffixes_expressions_and_single_names():
    model = tiny_model("llama")
    assert ends(choose_targets(model, ["q_proj", "mlp.up_proj"])) == {"self_attn.q_proj", "mlp.up_proj"}
    assert ends(choose_targets(model, r".*\.(q|v)_proj")) == {"self_attn.q_proj", "self_attn.v_proj"}
    assert choose_targets(model, "model.layers.1.self_attn.q_proj") == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(("layers", "expected"), [("all", {0, 1, 2, 3}), ("last 2", {2, 3}), ([0, -1], {0, 3})])
def test_layers_choose(layers, expected):
    names = choose_targets(tiny_model("llama"), layers=layers)
    assert {int(name.split(".")[2]) for name in names} == expected


@pytest.mark.parametrize("layers", ["last 9", "first 2", [4], [], "last 0"])
def test_layers_that_are_not_there_are_refused(layers):
    with pytest.raises(UserError, match=r"lora\.layers"):
        choose_targets(tiny_model("llama"), layers=layers)


def test_every_pattern_without_a_match_is_named_with_near_names():
    with pytest.raises(UserError) as caught:
        choose_targets(tiny_model("llama"), ["q_prj", "query_key_value", "v_proj"])
    first, second = caught.value.problems
    assert "q_prj" in first.place and "q_proj" in first.fix
    assert "query_key_value" in second.place


@pytest.mark.parametrize("pattern", ["lm_head", "embed_tokens"])
def test_head_and_embedding_are_refused(pattern):
    with pytest.raises(UserError, match="takes no adapter"):
        choose_targets(tiny_model("llama"), [pattern])


def test_a_module_of_the_prologue_is_refused_by_name():
    with pytest.raises(UserError, match=r"model\.per_layer_model_projection lies outside"):
        choose_targets(tiny_model("gemma3n_text"), ["per_layer_model_projection"])


def test_what_is_no_linear_is_refused():
    with pytest.raises(UserError, match="not a linear"):
        choose_targets(tiny_model("gpt_oss"), ["router"])
    with pytest.raises(UserError, match="not a regular expression"):
        choose_targets(tiny_model("llama"), ["(q_proj"])


def test_short_names_only_where_they_mean_the_same():
    model = tiny_model("llama")
    assert shortest_patterns(model, choose_targets(model, ["q_proj", "v_proj"])) == ["q_proj", "v_proj"]
    some = choose_targets(model, ["q_proj"], layers="last 1")
    assert shortest_patterns(model, some) == some
