"""Adapters: PEFT's files and PEFT's numbers, fp32 masters, and states that come back exactly."""

import json
import math
import os

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from longtune.errors import UserError
from longtune.model.adapter_files import read_updates
from longtune.model.adapters import (
    adapters_disabled,
    add_lora,
    init_adapter,
    load_adapter,
    parameter_groups,
    save_adapter,
)
from longtune.model.lora import LeanLinear
from support import tiny_model


def tokens(count=17, seed=0):
    return torch.randint(3, 97, (2, count), generator=torch.Generator().manual_seed(seed))


def with_b(model, seed=0):
    """The adapter with a B that isn't zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def lora(family="llama", dtype=torch.float32, **settings):
    return add_lora(tiny_model(family, dtype), **{"rank": 4, "alpha": 8, **settings})


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens(), use_cache=False).logits


def test_a_is_uniform_by_its_input_and_b_is_zero():
    model = lora(rank=32)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if "lora_A" in name:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
            assert abs(parameter.std() / bound - 3**-0.5) < 0.06
        elif "lora_B" in name:
            assert not parameter.any()


def test_a_depends_on_the_seed_and_the_module_alone():
    torch.manual_seed(1)
    first = dict(lora(seed=3).named_parameters())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    model = tiny_model("llama", torch.float32)
    torch.set_rng_state(state)
    second = dict(add_lora(model, rank=4, alpha=8, seed=3, targets=["q_proj"]).named_parameters())
    assert torch.equal(torch.get_rng_state(), state), "the global generator was read"
    other = dict(lora(seed=4).named_parameters())
    name = next(name for name in second if "lora_A" in name)
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("rslora", [False, True])
def test_logits_and_gradients_equal_pefts_own_layer(rslora):
    ours = with_b(lora(rslora=rslora))
    targets = sorted(ours.peft_config["default"].target_modules)
    theirs = get_peft_model(
        tiny_model("llama", torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM"),
    )
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model.train()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
    for (name, mine), peer in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, peer.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_masters_stay_fp32_and_no_fp32_copy_of_the_input_is_made():
    model = with_b(lora(dtype=torch.bfloat16)).train()
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    x = torch.randn(1, 50, 32, dtype=torch.bfloat16)
    layer = next(module for module in model.modules() if isinstance(module, LeanLinear))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert not any(t.dtype == torch.float32 and t.shape[0] == 50 for t in saved)
    out.sum().backward()
    assert layer.lora_A["default"].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("situation", ["disabled", "merged", "two adapters", "autocast"])
def test_what_is_not_plain_is_left_to_peft(situation):
    model = with_b(lora(targets=["q_proj"])).eval()
    reference = logits(model)
    if situation == "disabled":
        with model.disable_adapter():
            expected = logits(tiny_model("llama", torch.float32))
            torch.testing.assert_close(logits(model), expected)
    elif situation == "merged":
        model.merge_adapter()
        torch.testing.assert_close(logits(model), reference, rtol=1e-4, atol=1e-5)
        model.unmerge_adapter()
    elif situation == "two adapters":
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
        assert not torch.allclose(logits(model), reference)
        model.base_model.set_adapter(["default"])
    else:
        with torch.autocast("cpu", torch.bfloat16):
            assert logits(model).isfinite().all()
    torch.testing.assert_close(logits(model), reference, rtol=1e-5, atol=1e-5)


def test_dropout_is_applied_in_training_alone():
    model = with_b(lora(dropout=0.5))
    model.eval()
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "gpt_oss", "deepseek_v3", "phi3"])
def test_saved_adapters_load_in_peft_with_equal_logits(family, tmp_path):
    model = with_b(lora(family)).eval()
    save_adapter(model, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(tiny_model(family, torch.float32), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    again = load_adapter(tiny_model(family, torch.float32), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(model))
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_saving_replaces_the_folder_whole_and_leaves_nothing_beside_it(tmp_path):
    model = lora()
    save_adapter(model, tmp_path / "adapter")
    (tmp_path / "adapter" / "stray").touch()
    save_adapter(with_b(model), tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])


def test_a_run_folder_counts_as_its_adapter(tmp_path):
    save_adapter(with_b(lora()), tmp_path / "adapter")
    assert load_adapter(tiny_model("llama", torch.float32), tmp_path, trainable=True)


def test_an_adapter_of_another_model_is_refused_module_by_module(tmp_path):
    save_adapter(lora(), tmp_path / "a")
    with pytest.raises(UserError) as caught:
        load_adapter(tiny_model("llama", torch.float32, intermediate_size=64), tmp_path / "a")
    assert "model.layers.0.mlp" in str(caught.value) and "64" in str(caught.value)
    with pytest.raises(UserError, match="the model has not"):
        load_adapter(tiny_model("llama", torch.float32, num_hidden_layers=2), tmp_path / "a")


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: init_adapter(lora(), folder),
        lambda folder: load_adapter(tiny_model("llama"), folder),
        read_updates,
    ],
)
def test_a_run_that_is_not_finished_names_its_checkpoints(read, tmp_path):
    run = tmp_path / "run"
    for number, step in enumerate((2, 4, 6, 8)):
        save_adapter(lora(), run / "checkpoints" / f"step-{step:05d}")
        os.utime(run / "checkpoints" / f"step-{step:05d}" / "adapter_config.json", (1000 + number, 1000 + number))
    with pytest.raises(UserError, match="isn't finished") as caught:
        read(run)
    (problem,) = caught.value.problems
    named = [str(run / "checkpoints" / f"step-{step:05d}") for step in (8, 6, 4)]
    assert problem.fix == f"name one of its checkpoints: {' or '.join(named)}"
    read(named[0])


def test_what_is_no_whole_adapter_is_refused(tmp_path):
    model = tiny_model("llama", torch.float32)
    with pytest.raises(UserError, match="no such folder"):
        load_adapter(model, tmp_path / "none")
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        load_adapter(model, tmp_path)
    save_adapter(lora(), tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        load_adapter(model, tmp_path / "a")
    (tmp_path / "a" / "adapter_model.bin").touch()
    with pytest.raises(UserError, match="pickled"):
        load_adapter(model, tmp_path / "a")
    cut = {name: tensor[:1] if "lora_A" in name else tensor[:, :1] for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in cut.items()}, weights)
    with pytest.raises(UserError, match="other sizes"):
        load_adapter(tiny_model("llama", torch.float32), tmp_path / "a")
    weights.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="can't be read"):
        load_adapter(model, tmp_path / "a")
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, weights)
    with pytest.raises(UserError, match="has no tensor"):
        load_adapter(model, tmp_path / "a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in (0, -1, "4", None, [4], True)),
        *(("lora_alpha", value) for value in (None, "8", [8], math.inf)),
        *(("rank_pattern", value) for value in ([1], "x", {"q_proj": 0}, {"q_proj": "4"}, {"q_proj": None}, {"(": 4})),
        *(("alpha_pattern", value) for value in ([1], {"q_proj": None}, {"*": 4})),
    ],
)
def test_settings_that_give_no_scale_are_named(key, value, tmp_path):
    save_adapter(lora(), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"adapter_config\.json: {key}.* (not|no) "):
        read_updates(tmp_path / "a")


@pytest.mark.parametrize(("key", "value"), [("target_modules", 7), ("target_modules", [7]), ("target_parameters", [7])])
def test_targets_that_are_no_names_are_named(key, value, tmp_path):
    save_adapter(lora(), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"adapter_config\.json: {key} is .*, not names"):
        load_adapter(tiny_model("llama", torch.float32), tmp_path / "a")


@pytest.mark.parametrize(
    "change", [{"target_modules": ["q_proj"]}, {"target_modules": None}, {"layers_to_transform": [0]}]
)
def test_tensors_that_the_config_does_not_mean_are_not_left_out_silently(change, tmp_path):
    save_adapter(lora(), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=r"lora_A\.weight: is meant by nothing in adapter_config\.json"):
        load_adapter(tiny_model("llama", torch.float32), tmp_path / "a")


def test_whole_numbers_are_no_adapter(tmp_path):
    save_adapter(lora(), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].to(torch.int32)}, file)
    for read in (read_updates, lambda folder: load_adapter(tiny_model("llama", torch.float32), folder)):
        with pytest.raises(UserError) as found:
            read(tmp_path / "a")
        assert f"{name}: holds no floating numbers" in str(found.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_values_that_are_not_finite_are_named_before_anything_is_made_of_them(half, value, tmp_path):
    save_adapter(lora(), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if half in name)
    tensors[name][1, 1] = value
    save_file(tensors, file)
    with pytest.raises(UserError, match="not finite, as 1 of"):
        read_updates(tmp_path / "a")


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "[" * 100_000])
def test_a_config_that_is_none_is_named(text, tmp_path):
    save_adapter(lora(), tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=r"adapter_config\.json: can't be read"):
        read_updates(tmp_path / "a")


@pytest.mark.parametrize(("alpha", "rslora"), [(8, False), (32, False), (8, True)])
def test_a_warm_start_computes_what_the_saved_adapter_computed(alpha, rslora, tmp_path):
    old = with_b(lora())
    save_adapter(old, tmp_path / "a")
    new = lora(alpha=alpha, rslora=rslora, seed=9)
    init_adapter(new, tmp_path / "a")
    torch.testing.assert_close(logits(new), logits(old), rtol=1e-5, atol=1e-5)
    assert all(p.requires_grad for n, p in new.named_parameters() if "lora_" in n)


def test_a_warm_start_lists_what_does_not_match(tmp_path):
    save_adapter(lora(targets=["q_proj", "v_proj"]), tmp_path / "a")
    with pytest.raises(UserError) as caught:
        init_adapter(lora(rank=2, targets=["q_proj", "k_proj"]), tmp_path / "a")
    text = str(caught.value)
    assert "[4, 32] there, [2, 32] here" in text and "nothing there" in text and "more" in text


def test_disabling_restores_every_module_exactly():
    model = with_b(lora())
    base = logits(tiny_model("llama", torch.float32))
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    layers[0].enable_adapters(False)
    scales = [dict(layer.scaling) for layer in layers]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    before = logits(model)
    with pytest.raises(RuntimeError), adapters_disabled(model):
        assert torch.equal(logits(model), base)
        with adapters_disabled(model):
            pass
        assert torch.equal(logits(model), base)
        assert [parameter.requires_grad for parameter in model.parameters()] == trainable
        raise RuntimeError
    assert torch.equal(logits(model), before)
    assert layers[0].disable_adapters and not layers[1].disable_adapters
    assert [dict(layer.scaling) for layer in layers] == scales
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable


def test_b_learns_faster_by_the_ratio():
    model = lora()
    a, b = parameter_groups(model, learning_rate=1e-3, weight_decay=0.1, lora_plus_ratio=16)
    assert (a["lr"], b["lr"]) == (1e-3, 16e-3) and a["weight_decay"] == b["weight_decay"] == 0.1
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("lora_A" in names[id(parameter)] for parameter in a["params"])
    assert all("lora_B" in names[id(parameter)] for parameter in b["params"])
    assert len(a["params"]) == len(b["params"]) == 4 * 7
    with pytest.raises(UserError, match="below 1"):
        parameter_groups(model, learning_rate=1e-3, lora_plus_ratio=0.5)


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(UserError) as caught:
        lora(rank=0, alpha=-1, dropout=1.0, rank_policy="by_size", targets=["nothing"], layers="last 1")
    places = {problem.place for problem in caught.value.problems}
    assert places == {"lora.rank", "lora.alpha", "lora.dropout", "lora.rank_policy", "lora.targets: nothing"}
