"""The modules and parameters inside a module, found fast.

`nn.Module.modules` and `.parameters` pass each entry up through a generator for every level, with its name. A walk
looks through a whole model before its first kernel can start; thousands of modules (seven LoRA layers of ten modules
each in every decoder layer) would then leave the device without work for a good part of a short step.
"""

from __future__ import annotations

from torch import nn


def modules_of(module: nn.Module, without: nn.Module | None = None) -> list[nn.Module]:
    """The module and all that are inside, each once, in the order of `nn.Module.modules`.

    Args:
        without: a module inside that is left out with all that is in it (what is elsewhere too is found there).
    """
    found: dict[nn.Module, None] = {}
    ahead = [module]
    while ahead:
        module = ahead.pop()
        if module not in found and module is not without:
            found[module] = None
            if module._modules:
                ahead += [m for m in reversed(module._modules.values()) if m is not None]
    return list(found)


def parameters_of(*modules: nn.Module) -> list[nn.Parameter]:
    """The modules' own parameters, not those of modules inside them; each once."""
    return list({p: None for m in modules if m._parameters for p in m._parameters.values() if p is not None})
