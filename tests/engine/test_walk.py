"""The walk's own behaviour: dropout that repeats, what is trained outside the layers, models that can't be chunked."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from longtune.engine import Engine, Plan
from longtune.errors import UserError
from longtune.objective import get
from longtune.tree import Forest
from tests import support


def walk_gradients(engine: Engine, forest: Forest, key=(3, 1), cotangent=None) -> dict[str, torch.Tensor]:
    if cotangent is None:
        cotangent = -forest.targets.weight.double()
    return support.walk_gradients(engine, forest, cotangent, key)


@pytest.mark.parametrize("name", ["clean_llama", "gemma4_text"])
def test_recomputed_cells_repeat_their_dropout(name):
    base = support.clean_llama() if name == "clean_llama" else support.tiny_model(name)
    model = support.with_lora(base, dropout=0.3)
    model.train()
    forest = Forest([support.random_sequence(16), support.random_sequence(7, seed=1)])
    engine = Engine(model, seed=5)
    before = torch.get_rng_state()
    for chunk in (None, 5):
        plans = [
            Plan(chunk_tokens=chunk, layers_per_segment=layers, keep=keep, boundary_store=store)
            for layers, keep, store in itertools.product((1, 2, None), ("nothing", "attention"), ("device", "host"))
        ]
        plans += [Plan(chunk_tokens=chunk, keep=keep, halves=True) for keep in ("nothing", "attention")]
        # Keeping everything recomputes nothing: what the others must repeat.
        engine.set_plan(Plan(chunk_tokens=chunk, keep="everything"))
        truth = walk_gradients(engine, forest)
        for plan in plans:
            engine.set_plan(plan)
            assert support.worst(walk_gradients(engine, forest), truth) < 1e-9, plan
        assert support.worst(walk_gradients(engine, forest, key=(3, 2)), truth) > 1e-2
        model.eval()
        assert support.worst(walk_gradients(engine, forest), truth) > 1e-2
        model.train()
    assert torch.equal(torch.get_rng_state(), before), "the global generator must be left as it was"


def test_dropout_differs_between_seeds_steps_and_chunks():
    model = support.with_lora(support.clean_llama(), dropout=0.5)
    model.train()
    forest = Forest([support.random_sequence(12)])
    found = []
    for seed, key, chunk in ((0, (0, 0), None), (1, (0, 0), None), (0, (1, 0), None), (0, (0, 0), 6)):
        found.append(walk_gradients(Engine(model, Plan(chunk_tokens=chunk), seed=seed), forest, key))
    for one, other in itertools.combinations(found, 2):
        assert support.worst(one, other) > 1e-2


@pytest.mark.parametrize("chunk", [None, 4])
def test_any_trained_parameter_has_its_gradient(chunk):
    """Embeddings, norms, biases, prologue projections and the head, not only what lies in the layers."""
    for name in ("llama", "gemma4_text", "gemma3n_text"):
        model = support.tiny_model(name)
        model.requires_grad_(True)
        forest = Forest([support.random_sequence(11)])
        cotangent = -forest.targets.weight.double()
        truth = support.oracle_gradients(model, forest, cotangent)
        engine = Engine(model, Plan(chunk_tokens=chunk))
        for keep, halves in (("nothing", False), ("nothing", True), ("everything", False)):
            engine.set_plan(Plan(chunk_tokens=chunk, keep=keep, halves=halves))
            found = walk_gradients(engine, forest)
            # Ordinary autograd gives zeros where the walk gives nothing: both mean no gradient.
            truth_there = {n: t for n, t in truth.items() if n in found or float(t.norm()) > 0}
            assert support.worst({n: found[n] for n in truth_there}, truth_there) < 1e-5, (name, keep)


def test_lora_on_a_prologue_module_of_gemma4():
    model = support.with_lora(support.tiny_model("gemma4_text"), targets=["per_layer_model_projection", "q_proj"])
    forest = Forest([support.random_sequence(11)])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(model, forest, cotangent)
    assert any("per_layer_model_projection" in name for name in truth)
    engine = Engine(model, Plan(chunk_tokens=4))
    assert support.worst(walk_gradients(engine, forest), truth) < 1e-5


def test_lora_on_the_head():
    model = support.with_lora(support.clean_llama(), targets=["lm_head", "q_proj"])
    forest = Forest([support.random_sequence(11)])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(model, forest, cotangent)
    assert any("lm_head" in name for name in truth)
    engine = Engine(model, Plan(chunk_tokens=4, head_chunk=3))
    assert support.worst(walk_gradients(engine, forest), truth) < 1e-9


def test_layers_below_the_first_trained_one_are_not_walked_back():
    model = support.with_lora(support.clean_llama())
    for name, parameter in model.named_parameters():
        if "layers.0." in name or "layers.1." in name:
            parameter.requires_grad_(False)
    forest = Forest([support.random_sequence(13)])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(model, forest, cotangent)
    engine = Engine(model)
    for plan in (Plan(), Plan(chunk_tokens=4, layers_per_segment=None), Plan(chunk_tokens=4, keep="everything")):
        engine.set_plan(plan)
        walk = engine.walk(forest, (0, 0), grad=True)
        assert walk.lowest == 2
        assert support.worst(walk_gradients(engine, forest), truth) < 1e-9


def test_linear_attention_runs_whole_or_is_refused():
    config = AutoConfig.for_model(
        "qwen3_next",
        **{**support.BASE, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        mlp_only_layers=[],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    model = support.with_lora(model.float().eval(), targets=["q_proj", "o_proj", "in_proj_qkvz", "out_proj"])
    engine = Engine(model)
    assert engine.unchunkable is not None and "outside attention" in engine.unchunkable
    forest = Forest([support.random_sequence(20)])
    cotangent = -forest.targets.weight
    truth = support.oracle_gradients(model, forest, cotangent)
    for plan in (Plan(), Plan(chunk_tokens=20, layers_per_segment=2), Plan(keep="everything")):
        engine.set_plan(plan)
        assert support.worst(walk_gradients(engine, forest, cotangent=cotangent), truth) < 1e-3
    for forest, plan in (
        (Forest([support.random_sequence(20)]), Plan(chunk_tokens=8)),
        (Forest([support.random_sequence(5), support.random_sequence(5)]), Plan()),
        (Forest([support.pair_tree(5, (2, 3))]), Plan()),
    ):
        engine.set_plan(plan)
        with pytest.raises(UserError, match="one sequence per row in one chunk"):
            engine.walk(forest, (0, 0), grad=True)


def test_two_models_in_one_process_do_not_meet():
    models = [support.with_lora(support.clean_llama(seed=s)) for s in range(2)]
    forest = Forest([support.random_sequence(12)])
    engines = [Engine(model, Plan(chunk_tokens=5)) for model in models]
    cotangent = -forest.targets.weight.double()
    truths = [support.oracle_gradients(model, forest, cotangent) for model in models]
    walks = [engine.walk(forest, (0, 0), grad=True) for engine in engines]
    for walk in walks:
        walk.forward()
    for walk in reversed(walks):
        walk.head(cotangent)
    for walk, model, truth in zip(walks, models, truths, strict=True):
        walk.backward()
        walk.sums.deliver()
        assert support.worst(support.gradients(model), truth) < 1e-9


def test_an_engine_leaves_nothing_behind():
    model = support.with_lora(support.clean_llama())
    names = set(AttentionInterface._global_mapping)
    before = model.model.config._attn_implementation
    engine = Engine(model)
    engine.accumulate(Forest([support.random_sequence(9)]), get("sft"), {"weight": 1.0})
    assert model.model.config._attn_implementation == before
    assert all(type(layer).__name__ == "LlamaDecoderLayer" for layer in model.model.model.layers)
    engine.close()
    assert set(AttentionInterface._global_mapping) == names
    Engine(model)
    gc.collect()
    assert set(AttentionInterface._global_mapping) == names, "a forgotten engine must leave the registry too"


def test_the_walk_frees_what_it_kept_when_a_step_fails():
    model = support.with_lora(support.clean_llama())
    engine = Engine(model, Plan(boundary_store="host", chunk_tokens=4))
    forest = Forest([support.random_sequence(9)])
    walk = engine.walk(forest, (0, 0), grad=True)
    walk.forward()
    with pytest.raises(IndexError):
        walk.head(torch.zeros(3, 3, 3))
    truth = support.oracle_gradients(model, forest, -forest.targets.weight.double())
    assert support.worst(walk_gradients(engine, forest), truth) < 1e-9


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_a_walk_goes_on_as_it_began_when_the_plan_changes(store):
    model = support.with_lora(support.clean_llama())
    forest = Forest([support.random_sequence(23), support.pair_tree(9, (4, 5))])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(model, forest, cotangent)
    engine = Engine(model)
    others = [Plan(boundary_store=other, head_chunk=2) for other in ("device", "host", "disk")]
    for keep, at in itertools.product(("nothing", "kv", "attention", "everything"), (1, 2)):
        engine.set_plan(Plan(chunk_tokens=4, layers_per_segment=2, keep=keep, boundary_store=store))
        walk = engine.walk(forest, (0, 0), grad=True)
        steps = [walk.forward, lambda: walk.head(cotangent), walk.backward]  # noqa: B023
        for number, step in enumerate(steps):
            if number == at:
                for other in others:
                    engine.set_plan(other)
            step()
        walk.sums.deliver()
        found = support.gradients(model)
        model.zero_grad()
        assert support.worst(found, truth) < 1e-6, (keep, at)
    engine.close()


def test_chunked_masks_are_refused():
    config = AutoConfig.for_model(
        "llama4_text",
        **{**support.BASE, "num_hidden_layers": 2},
        attention_chunk_size=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=3,
        intermediate_size_mlp=32,
        no_rope_layers=[1, 0],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(UserError, match="neither causal nor a sliding window"):
        Engine(model)


def test_attention_dropout_is_refused():
    model = support.tiny_model("llama", attention_dropout=0.1)
    model.train()
    engine = Engine(support.with_lora(model).train())
    with pytest.raises(UserError, match="attention_dropout"):
        engine.accumulate(Forest([support.random_sequence(9)]), get("sft"), {"weight": 1.0})


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_the_length_see_the_whole_row(kind):
    """A chunk near the row's start has small positions, and must still get the frequencies of the whole row."""
    family = "phi3" if kind == "longrope" else "llama"
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
        rope = {**rope, **factors, "attention_factor": 1.2}

    def make():
        limits = dict(max_position_embeddings=16, original_max_position_embeddings=16)
        return support.with_lora(support.tiny_model(family, rope_parameters=rope, **limits))

    long, short = support.random_sequence(25), support.random_sequence(9)
    for tree in (short, long):
        forest = Forest([tree])
        cotangent = -forest.targets.weight.double()
        truth = support.oracle_gradients(make(), forest, cotangent)
        model = make()
        engine = Engine(model)
        for chunk in (4, None):
            engine.set_plan(Plan(chunk_tokens=chunk))
            assert support.worst(walk_gradients(engine, forest), truth) < 1e-5, (tree.size, chunk)
        assert "forward" not in vars(model.base_model.model.model.rotary_emb)
    with pytest.raises(UserError, match="rotary embedding depends on the row's length"):
        engine.walk(Forest([long, short]), (0, 0), grad=True)
    both = Forest([short, support.random_sequence(9, seed=4)])
    truth = support.oracle_gradients(make(), both, -both.targets.weight.double())
    assert support.worst(walk_gradients(Engine(make(), Plan(chunk_tokens=4)), both), truth) < 1e-5


OTHERS = {
    # The model calls the decoder inside its base.
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    # The head is more than one matrix.
    "modernbert-decoder": dict(local_attention=12, global_attn_every_n_layers=2),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("trained", [True, False])
def test_heads_of_other_shapes_are_exact(name, trained):
    settings = {k: v for k, v in support.BASE.items() if k != "head_dim"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**settings, **OTHERS[name]})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    decoder = {id(p) for p in model.get_decoder().parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(trained or id(parameter) in decoder)
    for place, parameter in model.named_parameters():
        if place.endswith("k_proj.bias"):
            # Moves all of a query's scores alike: its gradient is zero, and what is computed is rounding.
            parameter.requires_grad_(False)
    forest = Forest([support.random_sequence(11)])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(model, forest, cotangent)
    engine = Engine(model, Plan(chunk_tokens=4, head_chunk=3))
    expected = support.oracle_log_probs(model, forest).detach()
    assert torch.allclose(engine.log_probs(forest), expected, atol=1e-6)
    assert support.worst(walk_gradients(engine, forest), truth) < 1e-5


def test_a_model_with_attention_of_its_own_is_refused():
    """ALiBi is added to the scores outside the function that the engine takes the place of."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", vocab_size=97, hidden_size=32, n_layer=2))
    with pytest.raises(UserError, match="not supported"):
        Engine(model)


def test_an_image_encoder_is_not_taken_for_the_decoder():
    """It comes first in the model, and has as many layers."""
    text = {**support.BASE, "model_type": "llama", "num_hidden_layers": 2}
    vision = dict(
        model_type="clip_vision_model",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config).double().eval()
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    forest = Forest([support.random_sequence(11)])
    cotangent = -forest.targets.weight.double()
    truth = support.oracle_gradients(model, forest, cotangent)
    assert support.worst(walk_gradients(Engine(model, Plan(chunk_tokens=4)), forest), truth) < 1e-5


def test_damaged_weights_are_not_taken_for_an_architecture():
    model = support.clean_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        Engine(model)


def test_a_half_precision_model_that_rounding_moves_far_is_not_refused():
    """Trained weights may blow a rounding error of the embeddings up to the size of the hidden states."""
    model = support.tiny_model("llama", torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= {"q_proj": 300, "k_proj": 300, "v_proj": 10, "o_proj": 10}.get(name.split(".")[-2], 1)
    engine = Engine(model)
    assert engine._rounding(torch.arange(6)) > 0.1
    assert engine.unchunkable is None


def test_a_closed_engine_says_so():
    engine = Engine(support.tiny_model("llama"))
    engine.close()
    with pytest.raises(RuntimeError, match="the engine was closed"):
        engine.log_probs(Forest([support.random_sequence(5)]))
