"""Linears that read one input are computed together, and give what each gives alone."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn

from longtune.engine import Engine
from longtune.model.adapters import add_lora
from longtune.model.lora import LeanLinear, joining, use_lean_layers
from support import tiny_model

NAMES = ("a", "b", "c")


class Three(nn.Module):
    """Three linears on one input, a fourth on what they give; `between` happens after the first."""

    def __init__(self, between=None, bias=True):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, n, bias=bias) for n in (4, 5, 4))
        self.d = nn.Linear(4, 6, bias=bias)
        self.between = between

    def forward(self, x):
        a = self.a(x)
        if self.between is not None:
            x = self.between(x)
        return self.d(a * self.c(x) + self.b(x).sum(-1, keepdim=True))


def adapted(module: nn.Module, dropout: float = 0.0, ranks=(2, 3, 4)) -> nn.Module:
    from peft.tuners.lora import LoraModel

    pattern = dict(zip(NAMES, ranks, strict=True))
    config = LoraConfig(r=2, lora_alpha=6, target_modules=[*NAMES, "d"], lora_dropout=dropout, rank_pattern=pattern)
    model = LoraModel(module.double(), use_lean_layers(config, module), "default")
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data = p.data.double()
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = model(leaf * 1.0)
    y.square().sum().backward()
    found = [y.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
    model.zero_grad()
    return found


def linears(model: nn.Module) -> dict[str, LeanLinear]:
    return {n.rpartition(".")[2]: m for n, m in model.named_modules() if isinstance(m, LeanLinear)}


def join(model: nn.Module, x: torch.Tensor) -> None:
    with joining(model), torch.no_grad():
        model(x)


@pytest.mark.parametrize("bias", [True, False])
def test_joined_linears_give_what_each_gives_alone(bias):
    model = adapted(Three(bias=bias))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    alone = run(model, x)
    join(model, x)
    assert [linears(model)[n].followers for n in ("a", "b", "c", "d")] == [
        (linears(model)["c"], linears(model)["b"]),
        (),
        (),
        (),
    ]
    for _ in range(2):
        torch.testing.assert_close(run(model, x), alone)


@pytest.mark.parametrize(
    "between", [lambda x: x.mul_(2), lambda x: x * 1, lambda x: x[:]], ids=["changed", "another", "view"]
)
def test_another_input_in_between_is_not_joined(between):
    model = adapted(Three(between))
    x = torch.randn(3, 6, dtype=torch.float64)
    with torch.no_grad():
        alone = model(x.clone())
        join(model, x.clone())
        assert linears(model)["a"].followers == ()
        torch.testing.assert_close(model(x.clone()), alone)


def test_a_follower_called_with_another_input_than_learnt_computes_it():
    model = adapted(Three())
    x = torch.randn(3, 6, dtype=torch.float64)
    join(model, x)
    model.model.between = lambda x: x * 2
    joined = run(model, x)
    for linear in linears(model).values():
        linear.followers = ()
    torch.testing.assert_close(run(model, x), joined)


def test_nothing_of_an_interrupted_forward_is_used_later():
    model = adapted(Three())
    x = torch.randn(3, 6, dtype=torch.float64)
    join(model, x)
    linears(model)["a"](x)
    other = torch.randn(3, 6, dtype=torch.float64)
    joined = run(model, other)
    for linear in linears(model).values():
        linear.followers = ()
    torch.testing.assert_close(run(model, other), joined)


@pytest.mark.parametrize("state", ["merged", "disabled", "dropout"])
def test_what_only_peft_computes_is_left_to_it(state):
    model = adapted(Three(), dropout=0.5 if state == "dropout" else 0.0)
    x = torch.randn(3, 6, dtype=torch.float64)
    with torch.no_grad():
        join(model.eval(), x)
        model.train(state == "dropout")
        if state == "merged":
            linears(model)["b"].merge()
        if state == "disabled":
            linears(model)["b"].enable_adapters(False)
        torch.manual_seed(0)
        joined = model(x)
        for linear in linears(model).values():
            linear.followers = ()
        torch.manual_seed(0)
        torch.testing.assert_close(model(x), joined)


def test_a_copied_model_joins_its_own_linears():
    model = adapted(Three())
    join(model, torch.randn(3, 6, dtype=torch.float64))
    copied = copy.deepcopy(model)
    assert linears(copied)["a"].followers == (linears(copied)["c"], linears(copied)["b"])


def test_an_engine_joins_queries_keys_and_values_and_the_gated_products():
    model = add_lora(tiny_model("llama"), rank=2, alpha=4)
    engine = Engine(model)
    joined = {
        n.rpartition(".")[2]: [f.base_layer.out_features for f in m.followers]
        for n, m in model.named_modules()
        if isinstance(m, LeanLinear) and m.followers
    }
    engine.close()
    assert set(joined) == {"q_proj", "gate_proj"}
    assert len(joined["q_proj"]) == 2 and len(joined["gate_proj"]) == 1
