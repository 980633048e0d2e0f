"""The frozen reference of preference runs: what it computes, and that going there and back touches nothing else."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file

from longtune.errors import UserError
from longtune.model.adapters import add_lora, save_adapter
from longtune.model.reference import adapter_digest, fingerprint, load_reference, reference_active
from tests.support import tiny_model

IDS = torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(0))


def drawn(model, seed):
    """The trained adapter with values of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and ".reference." not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def uneven(seed=1, **changes):
    """Dropout, rsLoRA, uneven ranks and scales, one layer without an adapter, and one module frozen by hand."""
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=r".*layers\.[1-9].*_proj",
        lora_dropout=0.3,
        use_rslora=True,
        rank_pattern={"q_proj": 2, "down_proj": 7},
        alpha_pattern={"k_proj": 3, "down_proj": 1},
        **changes,
    )
    model = drawn(get_peft_model(tiny_model("llama", torch.float32), config), seed)
    model.train()
    model.get_submodule("base_model.model.model.layers.2.mlp").eval()
    next(p for n, p in model.named_parameters() if "layers.3" in n and "lora_A" in n).requires_grad_(False)
    return model


def state(model):
    """Everything that switching could leave changed."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    return {
        "scaling": {name: dict(layer.scaling) for name, layer in layers.items()},
        "active": {name: list(layer.active_adapters) for name, layer in layers.items()},
        "disabled": {name: layer.disable_adapters for name, layer in layers.items()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "values": {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name},
    }


def logits(model):
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        found = model(input_ids=IDS, use_cache=False).logits
    for module in training:
        module.training = True
    return found


def same(before, after):
    for part in before:
        if part == "values":
            assert before[part].keys() == after[part].keys()
            assert all(torch.equal(before[part][name], after[part][name]) for name in before[part])
        else:
            assert before[part] == after[part], part


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """A saved adapter with targets, ranks and scales of its own; and the logits of the base model under it."""
    folder = tmp_path_factory.mktemp("frozen") / "adapter"
    model = drawn(add_lora(tiny_model("llama", torch.float32), rank=3, alpha=9, dropout=0.2), 7)
    save_adapter(model, folder)
    return folder, logits(model)


def test_without_a_frozen_adapter_the_reference_is_the_base_model():
    model = uneven()
    before, tuned = state(model), logits(model)
    with reference_active(model):
        torch.testing.assert_close(logits(model), logits(tiny_model("llama", torch.float32)))
    same(before, state(model))
    assert torch.equal(logits(model), tuned)


def test_a_frozen_adapter_is_the_reference_and_the_trained_one_is_as_it_was(frozen):
    folder, expected = frozen
    model = uneven()
    before, tuned = state(model), logits(model)
    training = [(module, module.training) for module in model.modules()]
    load_reference(model, folder)
    after = state(model)
    own = {name: value for name, value in after["requires_grad"].items() if ".reference." not in name}
    assert {n.replace(".base_layer.", "."): v for n, v in own.items()} == {
        n.replace(".base_layer.", "."): v for n, v in before["requires_grad"].items()
    }
    assert not any(value for name, value in after["requires_grad"].items() if ".reference." in name)
    assert all(module.training == value for module, value in training)
    assert all(after["scaling"][n]["default"] == scales["default"] for n, scales in before["scaling"].items())
    assert torch.equal(logits(model), tuned)
    for _ in range(2):
        with reference_active(model):
            torch.testing.assert_close(logits(model), expected)
        same(after, state(model))
        assert torch.equal(logits(model), tuned)


def test_an_exception_under_the_reference_restores_everything(frozen):
    for folder in (None, frozen[0]):
        model = uneven()
        if folder:
            load_reference(model, folder)
        before = state(model)
        with pytest.raises(RuntimeError, match="inside"), reference_active(model):
            raise RuntimeError("inside")
        same(before, state(model))


def test_adapters_that_were_switched_off_stay_off(frozen):
    model = uneven()
    load_reference(model, frozen[0])
    with model.disable_adapter():
        before, base = state(model), logits(model)
        with reference_active(model):
            torch.testing.assert_close(logits(model), frozen[1])
        same(before, state(model))
        assert torch.equal(logits(model), base)


def test_only_the_trained_adapter_is_saved(frozen, tmp_path):
    model = uneven()
    save_adapter(model, tmp_path / "before")
    load_reference(model, frozen[0])
    save_adapter(model, tmp_path / "after")
    assert sorted(p.name for p in (tmp_path / "after").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert PeftModel.from_pretrained(tiny_model("llama", torch.float32), str(tmp_path / "after"))


def test_a_frozen_adapter_of_another_model_is_refused(tmp_path):
    save_adapter(add_lora(tiny_model("llama", hidden_size=40), rank=2, alpha=4), tmp_path / "other")
    with pytest.raises(UserError, match="another model"):
        load_reference(uneven(), tmp_path / "other")
    with pytest.raises(UserError, match="no such folder"):
        load_reference(uneven(), tmp_path / "none")


def test_the_fingerprint_is_of_the_base_model_alone(frozen):
    plain = fingerprint(tiny_model("llama", torch.float32))
    model = uneven()
    assert fingerprint(model) == fingerprint(drawn(model, 3)) == plain
    load_reference(model, frozen[0])
    assert fingerprint(model) == plain
    edited = tiny_model("llama", torch.float32)
    edited.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 5] += 0.01
    assert fingerprint(edited) != plain
    assert fingerprint(tiny_model("llama", torch.bfloat16)) != plain
    assert fingerprint(tiny_model("llama", torch.float32, seed=1)) != plain
    assert fingerprint(tiny_model("llama", torch.float32, rms_norm_eps=1e-3)) != plain
    with torch.no_grad():
        model.get_base_model().lm_head.weight[3].mul_(1.01)
    assert fingerprint(model) != plain


def test_an_adapters_digest_changes_with_weights_and_scale(tmp_path):
    digests = set()
    for alpha, seed in ((4, 0), (8, 0), (4, 1)):
        save_adapter(drawn(add_lora(tiny_model("llama"), rank=2, alpha=alpha), seed), tmp_path / "adapter")
        digests.add(adapter_digest(tmp_path / "adapter"))
    assert len(digests) == 3
