"""Members of a module, against torch's own lists."""

import torch
from torch import nn

from longtune.model.members import modules_of, parameters_of


def tree() -> nn.Module:
    shared = nn.Linear(2, 3)
    inner = nn.ModuleDict({"a": shared, "list": nn.ModuleList([nn.LayerNorm(2), shared, nn.Dropout()])})
    root = nn.Sequential(inner, shared, nn.Linear(3, 2, bias=False))
    root.none = None  # A module's place may be empty, as may a parameter's.
    root.register_module("empty", None)
    root[2].weight = shared.weight
    return root


def test_modules_and_parameters_are_torchs_in_its_order():
    root = tree()
    assert modules_of(root) == list(root.modules())
    found, wanted = parameters_of(*modules_of(root)), list(root.parameters())
    assert [id(p) for p in found] == [id(p) for p in wanted]


def test_a_subtree_is_left_out_but_not_what_is_elsewhere_too():
    root = tree()
    inner = root[0]
    assert modules_of(root, without=inner) == [root, root[1], root[2]]
    assert modules_of(root, without=nn.Linear(1, 1)) == list(root.modules())


def test_only_own_parameters_are_given():
    root = tree()
    assert parameters_of(root) == []
    own = root[0]["list"][0]
    assert isinstance(own.weight, torch.Tensor)
    assert [id(p) for p in parameters_of(own)] == [id(own.weight), id(own.bias)]
