"""MLX checkpoints as mlx-lm writes them: the same logits, the same size, and errors that name the tensor."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtune.engine import Engine, Plan
from longtune.engine.trace import Ghost
from longtune.errors import UserError
from longtune.head.heads import Chunked
from longtune.model.adapters import add_lora
from longtune.model.loading import load_model
from longtune.model.packed import PackedExperts, PackedLinear, TiedHead, bits_of, packed_bytes
from longtune.model.packed.checkpoint import decode_floats, encode_floats, is_mlx
from longtune.model.packed.formats import Format, float_format
from longtune.model.packed.loader import load_packed
from longtune.model.packed.quantiser import quantise
from longtune.tree import Forest
from tests.model.packed import support
from tests.support import oracle_gradients, pair_tree, random_sequence, walk_gradients, worst

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32):
    return load_packed(folder, dtype, CPU)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A 4-bit llama, its head packed too."""
    folder = tmp_path_factory.mktemp("llama")
    support.write_plain(folder / "plain", "llama")
    return support.convert(folder / "plain", folder / "packed", q_group_size=32, q_bits=4)


@pytest.fixture
def broken(llama, tmp_path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


CONVERTED = {
    "gemma2": ("gemma2", {"q_bits": 4, "q_group_size": 32}, {}, {"tie_word_embeddings": True, "sliding_window": 64}),
    "gemma3": (
        "gemma3_text",
        {"q_bits": 5, "q_group_size": 32},
        {"sliding_window_pattern": 2},
        {"tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"q_bits": 6, "q_group_size": 32},
        {"num_experts": 4, "rope_theta": 10000.0},
        {"moe_intermediate_size": 32},
    ),
    "mixed": ("llama", {"q_bits": 4, "q_group_size": 32, "quant_predicate": "mixed_3_6"}, {}, {"num_hidden_layers": 4}),
    "mxfp4": ("llama", {"q_mode": "mxfp4"}, {}, {}),
    "mxfp8": ("llama", {"q_mode": "mxfp8"}, {}, {"tie_word_embeddings": True}),
    "nvfp4": ("llama", {"q_mode": "nvfp4"}, {}, {}),
}


def test_a_llama_has_the_logits_of_mlx_lm(llama):
    model = load(llama)
    assert support.difference(support.logits(model), support.mlx_logits(llama)) < 1e-5
    assert isinstance(model.lm_head, PackedLinear)
    assert bits_of(model.model.layers[0].self_attn.q_proj) == 4


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_models_have_the_logits_of_mlx_lm(name, tmp_path):
    architecture, settings, extra, changes = CONVERTED[name]
    support.write_plain(tmp_path / "plain", architecture, extra, **changes)
    packed = support.convert(tmp_path / "plain", tmp_path / "packed", **settings)
    model = load(packed)
    assert support.difference(support.logits(model), support.mlx_logits(packed)) < 1e-5
    if changes.get("tie_word_embeddings"):
        assert isinstance(model.lm_head, TiedHead)
    if name == "mixed":
        assert {bits_of(layer.mlp.down_proj) for layer in model.model.layers} == {3, 6}
    if name == "qwen3_moe":
        assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, PackedExperts)


def test_memory_is_that_of_the_files(llama):
    tensors = {name: tensor for file in llama.glob("*.safetensors") for name, tensor in load_file(file).items()}
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    assert abs(packed_bytes(load(llama)) / size - 1) < 0.02


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_gradients_through_a_packed_base_are_those_through_its_dequantised_copy(name, llama, tmp_path):
    packed = llama
    if name != "llama":
        architecture, settings, extra, changes = CONVERTED[name]
        support.write_plain(tmp_path / "plain", architecture, extra, **changes)
        packed = support.convert(tmp_path / "plain", tmp_path / "packed", **settings)
    model = add_lora(load(packed, torch.float64), rank=4, alpha=8)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    forest = Forest([pair_tree(prompt=9, answers=(5, 4), vocab=262)])
    cotangent = torch.rand(len(forest.targets), generator=torch.Generator().manual_seed(0)).double()
    plain = oracle_gradients(model, forest, cotangent)
    if name != "qwen3_moe":
        # Experts have no dense module to be replaced by; they are held by the logits, and by their own tests.
        assert worst(plain, oracle_gradients(support.dense_copy(model), forest, cotangent)) < 1e-12
    engine = Engine(model, plan=Plan(chunk_tokens=5))
    try:
        assert isinstance(engine.head, Chunked)
        found = walk_gradients(engine, forest, cotangent)
    finally:
        engine.close()
    assert worst(found, plain) < 1e-6


def test_gpt_oss_like_experts_are_interleaved_and_transposed(tmp_path):
    """mlx-lm converts no such model from plain weights: the file is written here, and dense weights are the oracle."""
    model = support.write_plain(tmp_path / "model", "gpt_oss", vocab_size=262)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    format, tensors, read = Format("affine", 4, 32), {}, {}

    def put(path: str, weight: torch.Tensor) -> torch.Tensor:
        made = quantise(weight, format)
        tensors.update(made.tensors(path))
        packed = support.PackedWeight(
            format, weight.shape[-1], made.weight, made.scales, made.biases, compute_dtype=torch.float32
        )
        return packed.dequantise()

    for name, tensor in state.items():
        path = name.removesuffix(".weight")
        if name.endswith("experts.gate_up_proj"):
            at, wide = name.removesuffix("gate_up_proj"), tensor.transpose(1, 2)
            gate, up = put(f"{at}gate_proj", wide[:, ::2]), put(f"{at}up_proj", wide[:, 1::2])
            read[name] = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
        elif name.endswith("experts.gate_up_proj_bias"):
            at = name.removesuffix("gate_up_proj_bias")
            tensors[f"{at}gate_proj.bias"], tensors[f"{at}up_proj.bias"] = (
                tensor[:, i::2].contiguous() for i in (0, 1)
            )
        elif name.endswith("experts.down_proj"):
            read[name] = put(name, tensor.transpose(1, 2)).transpose(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            tensors[f"{name.removesuffix('_bias')}.bias"] = tensor
        elif path != name and tensor.ndim == 2:
            read[name] = put(path, tensor)
        else:
            tensors[name] = tensor
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization": {"group_size": 32, "bits": 4}}))
    model.load_state_dict({**state, **read})
    found = load(tmp_path / "model")
    assert support.difference(support.logits(found), support.logits(model)) < 1e-5


def test_names_of_a_language_model_inside_a_picture_model(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    inside = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    save_file({**inside, "vision_tower.patch.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert torch.equal(support.logits(load(tmp_path)), support.logits(load(llama)))


def test_an_unlisted_module_is_what_its_tensors_say(llama, broken):
    config = json.loads((broken / "config.json").read_text())
    # Another default: it counts for nothing where scales say better.
    config["quantization"] = config["quantization_config"] = {"group_size": 64, "bits": 2}
    (broken / "config.json").write_text(json.dumps(config))
    assert torch.equal(support.logits(load(broken)), support.logits(load(llama)))


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_unlisted_float_modes_are_told_by_bits_and_groups(mode, llama, broken):
    tensors = load_file(broken / "model.safetensors")
    path, format = "model.layers.0.mlp.up_proj", float_format(mode)
    del tensors[f"{path}.biases"]
    support.rewrite(broken, {**tensors, **quantise(torch.randn(96, 64), format).tensors(path)})
    assert load(broken).model.layers[0].mlp.up_proj.format == format


def test_a_module_listed_as_false_is_plain(llama, broken):
    path = "model.layers.1.mlp.up_proj"
    edit(broken, lambda q: q.update({path: False}))
    tensors = load_file(broken / "model.safetensors")
    plain = load(llama).model.layers[1].mlp.up_proj.dequantise()
    tensors[f"{path}.weight"] = plain
    for part in ("scales", "biases"):
        del tensors[f"{path}.{part}"]
    support.rewrite(broken, tensors)
    model = load(broken)
    assert type(model.model.layers[1].mlp.up_proj) is torch.nn.Linear
    assert support.difference(support.logits(model), support.logits(load(llama))) < 1e-5


def test_an_entry_wins_over_the_shape(broken):
    edit(broken, lambda q: q.update({"model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8}}))
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: weight is \[96, 8\]"):
        load(broken)


def edit(folder: Path, change) -> None:
    """Change the quantisation of a config."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization"])
    config["quantization_config"] = config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))


def drop(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


UP = "model.layers.0.mlp.up_proj"
DAMAGE = {
    "a scale is missing": (drop(f"{UP}.scales"), [f"{UP}.weight: is packed, and {UP}.scales is missing"]),
    "a bias is missing": (drop(f"{UP}.biases"), [f"{UP}.biases: is missing"]),
    "a weight is missing": (drop(f"{UP}.weight", f"{UP}.scales", f"{UP}.biases"), [f"{UP}.weight: is missing"]),
    "a norm is missing": (drop("model.norm.weight"), ["model.norm.weight: is missing"]),
    "a norm is too long": (
        lambda t: {**t, "model.norm.weight": torch.ones(65)},
        [r"model.norm.weight: is \[65\], the config says \[64\]"],
    ),
    "a weight has too few rows": (
        lambda t: {**t, **{f"{UP}.{p}": t[f"{UP}.{p}"][:7] for p in ("weight", "scales", "biases")}},
        [rf"{UP}.weight: has rows \[7\], the config says \[96\]"],
    ),
    "scales are too many": (
        lambda t: {**t, f"{UP}.scales": torch.zeros(96, 4)},
        [rf"{UP}.weight.*groups of 16|{UP}.weight: biases are"],
    ),
    "a weight is one number": (
        lambda t: {**t, f"{UP}.weight": t[f"{UP}.weight"][0, 0].clone()},
        [f"{UP}.weight: scales"],
    ),
    "a scale is one number": (lambda t: {**t, f"{UP}.scales": torch.tensor(1.0)}, [f"{UP}.weight: scales"]),
    "a scale is no number": (
        lambda t: {**t, f"{UP}.scales": torch.full_like(t[f"{UP}.scales"], math.nan)},
        [f"{UP}.scales: holds values that are not finite"],
    ),
    "a bias is infinite": (
        lambda t: {**t, f"{UP}.biases": torch.full_like(t[f"{UP}.biases"], math.inf)},
        [f"{UP}.biases: holds values that are not finite"],
    ),
    "biases are whole numbers": (
        lambda t: {**t, f"{UP}.biases": t[f"{UP}.biases"].to(torch.int64)},
        [f"{UP}.weight: biases are int64, not floating"],
    ),
    "scales are whole numbers": (
        lambda t: {**t, f"{UP}.scales": t[f"{UP}.scales"].to(torch.int32)},
        [f"{UP}.weight: scales are int32, not floating"],
    ),
    "something is left over": (
        lambda t: {**t, "model.layers.9.mlp.up_proj.weight": torch.ones(2)},
        ["model.layers.9.mlp.up_proj.weight: has no place"],
    ),
    "two things are wrong": (
        drop("model.norm.weight", f"{UP}.biases"),
        ["model.norm.weight: is missing", f"{UP}.biases: is missing"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage, broken):
    change, wanted = DAMAGE[damage]
    support.rewrite(broken, change(load_file(broken / "model.safetensors")))
    with pytest.raises(UserError) as found:
        load(broken)
    for pattern in wanted:
        assert re.search(pattern, str(found.value)), str(found.value)
    # One problem for each thing that is wrong.
    assert len(found.value.problems) == len(wanted)


def test_a_file_that_was_cut_is_named(broken):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"model\.safetensors: is no whole safetensors file"):
        load(broken)


def test_a_tensor_that_only_the_index_knows_is_named(broken):
    index = broken / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.extra.weight"] = "model.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"model\.extra\.weight: the index lists it"):
        load(broken)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"bits": 4, "group_size": 32, "mode": "int4"}, "unknown mode 'int4'"),
        ({"bits": 7, "group_size": 32}, "no width of 7 bits"),
        ({"bits": 4, "group_size": 32, "mode": ["affine"]}, "unknown mode|no format"),
        ({"bits": [4], "group_size": 32}, r"bits is \[4\], no whole number"),
        ({"bits": 0, "group_size": 32}, "no width of 0 bits"),
        ({"bits": True, "group_size": 32}, "bits is True, no whole number"),
        ({"bits": 4, "group_size": 48}, "groups of 48 don't divide a row of 64"),
        ({"bits": 4, "group_size": {"__float__": "Infinity"}}, "group_size is inf, no whole number"),
        ({"bits": {"__float__": "NaN"}, "group_size": 32}, "bits is nan, no whole number"),
        ("yes", "neither a format nor false"),
    ],
)
def test_an_entry_that_means_nothing_is_named(entry, reason, broken):
    edit(broken, lambda q: q.update({UP: entry}))
    with pytest.raises(UserError, match=rf"{UP}\.weight: .*{reason}"):
        load(broken)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 7},
        {"bits": 0},
        {"bits": "4"},
        {"bits": {"__float__": "Infinity"}},
        {"group_size": 0},
        {"group_size": 1.5},
        {"group_size": {"__float__": "Infinity"}},
        {"mode": "nf4"},
        {"mode": ["affine"]},
    ],
    ids=str,
)
def test_a_format_for_all_modules_that_means_nothing_is_named(change, broken):
    edit(broken, lambda q: q.update(change))
    with pytest.raises(UserError, match=r"config\.json: quantization: "):
        load(broken)


@pytest.mark.parametrize("value", [[1], "4bit", 4])
def test_a_quantisation_that_is_no_mapping_is_named(value, broken):
    file = broken / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": value}))
    with pytest.raises(UserError, match=r"config\.json: quantization_config: is .*, no mapping"):
        load_model(str(broken), device="cpu")


def test_an_entry_for_a_module_that_is_not_there_changes_nothing(llama, broken):
    edit(broken, lambda q: q.update({"vision_tower.layers.0.mlp": {"bits": 8, "group_size": 32}, "nobody": False}))
    ids = torch.from_numpy(support.TOKENS)
    with torch.no_grad():
        assert torch.equal(load(broken)(ids).logits, load(llama)(ids).logits)


@pytest.mark.parametrize("listed", ["", "3", "[]", "{}", '{"weight_map": 3}', '{"weight_map": null}'])
def test_an_index_that_can_not_be_used(listed, broken):
    (broken / "model.safetensors.index.json").write_text(listed)
    for read in (load, lambda folder: load_model(str(folder), device="cpu")):
        with pytest.raises(UserError, match=r"index\.json: can't be read"):
            read(broken)


@pytest.mark.parametrize(
    "key, value", [("hidden_act", "nope"), ("hidden_size", 0), ("vocab_size", 0), ("text_config", "x")]
)
def test_a_config_of_which_no_model_can_be_made(key, value, broken):
    file = broken / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(UserError, match=r"config|weight"):
        load(broken)


@pytest.mark.parametrize(
    "text", ["[]", "3", "{", "[" * 100_000, '{"model_type": "nothing", "quantization": {"bits": 4}}']
)
def test_a_config_that_can_not_be_used(text, broken):
    (broken / "config.json").write_text(text)
    for read in (load, lambda folder: load_model(str(folder), device="cpu")):
        with pytest.raises(UserError, match=r"config\.json"):
            read(broken)


def test_floats_that_json_has_no_word_for():
    values = {"a": [math.inf, {"b": -math.inf}], "c": 1.5, "d": "x"}
    written = json.loads(json.dumps(encode_floats(values), allow_nan=False))
    assert written["a"][0] == {"__float__": "Infinity"} and decode_floats(written) == values
    assert math.isnan(decode_floats(encode_floats({"x": math.nan}))["x"])


def test_a_config_with_such_floats_loads(llama, broken):
    config = json.loads((broken / "config.json").read_text())
    config["some_limit"] = {"__float__": "Infinity"}
    (broken / "config.json").write_text(json.dumps(config))
    assert load(broken).config.some_limit == math.inf


def test_a_folder_is_known_by_its_config_or_its_weights(llama, broken, tmp_path):
    assert is_mlx(llama) and not is_mlx(tmp_path)
    assert not is_mlx(llama.parent / "plain")
    config = json.loads((broken / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        del config[key]
    (broken / "config.json").write_text(json.dumps(config))
    assert is_mlx(broken), "mlx-lm notes its format in the file"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_model_takes_such_a_folder(llama, dtype):
    loaded = load_model(str(llama), dtype=dtype, device="cpu")
    assert loaded.source == "folder" and loaded.tokenizer is not None
    assert loaded.model.dtype == getattr(torch, dtype)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert support.logits(loaded.model).isfinite().all()


def test_a_model_without_memory_can_be_made_of_it(llama):
    model = load_packed(llama, torch.bfloat16, torch.device("meta"))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    out = model(input_ids=torch.zeros(1, 7, dtype=torch.int64, device="meta"))
    assert out.logits.shape == (1, 7, 262)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_a_plan_can_be_made_of_it(name, tmp_path):
    architecture, settings, extra, changes = CONVERTED[name]
    support.write_plain(tmp_path / "plain", architecture, extra, **changes)
    packed = support.convert(tmp_path / "plain", tmp_path / "packed", **settings)
    ghost = Ghost(add_lora(load(packed), rank=4, alpha=8), "cpu-flash", "cpu")
    try:
        assert ghost.trace(Plan(chunk_tokens=16), Forest([random_sequence(64, vocab=262)])).peak > 0
    finally:
        ghost.close()
