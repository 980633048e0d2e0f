"""Which weights of a model get an adapter: from what the user wrote to full names of linears and of experts' tensors.

Only linears inside the decoder layers can be targets, and the stacks that hold experts there (see `experts`). Output
head, embeddings and modules before or after the layers are refused with the reason, never skipped silently. Making the
adapters is the work of `adapters`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from longtune.errors import Problem, UserError
from longtune.model.experts import find_stacks
from longtune.model.packed.modules import PackedExperts

ALL_LINEAR = "all-linear"


def choose_targets(
    model: PreTrainedModel, targets: str | Sequence[str] = ALL_LINEAR, layers: str | Sequence[int] = "all"
) -> list[str]:
    """Full names of the linears to adapt, in the order of the model's modules, then of the stacks of experts.

    Args:
        model: a causal LM without adapters.
        targets: "all-linear" (every linear inside the decoder layers, but for those that `unnameable` lists); or
            names, each either the end of a name ("q_proj", "self_attn.q_proj") or a regular expression for the whole
            of it. Experts that are stored as one tensor for all are meant by the name of their module ("experts") or
            of the tensor ("experts.down_proj"); routers can't be.
        layers: "all", "last N", or layer numbers (negative ones count from the end).

    Raises:
        UserError: every pattern that matches nothing, or a module that can't be adapted.
    """
    prefix, count = decoder_layers(model)
    chosen_layers = _layer_numbers(layers, count)
    linears: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(f"{prefix}.") and is_linear(module):
            number = name[len(prefix) + 1 :].split(".", 1)[0]
            if int(number) in chosen_layers:
                linears.append(name)
    refused = unnameable(model)
    if targets == ALL_LINEAR:
        return [name for name in linears if _end(name) not in refused]
    stacks = [
        name
        for name in find_stacks(model)
        if name.startswith(f"{prefix}.") and int(name[len(prefix) + 1 :].split(".", 1)[0]) in chosen_layers
    ]
    patterns = [targets] if isinstance(targets, str) else list(targets)
    problems: list[Problem] = []
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            chosen.update(name for name in linears if _end(name) not in refused)
            continue
        try:
            found = [name for name in linears if _matches(pattern, name)]
            chosen_stacks = [name for name in stacks if _means_stack(pattern, name)]
        except re.error as error:
            problems.append(Problem(f"lora.targets: {pattern}", f"is not a regular expression ({error})"))
            continue
        # An expression that spans the whole model, such as `.*`, is not to be read as "the linears of it".
        outside = _first_refusal(model, pattern, prefix, [] if found or chosen_stacks else linears)
        if outside is not None:
            problems.append(outside)
        if lost := sorted({_end(name) for name in found} & refused):
            reason = f"on {model.config.model_type}, PEFT takes {', '.join(lost)} for experts, not for linears"
            problems.append(Problem(f"lora.targets: {pattern}", reason, f"use {ALL_LINEAR}, which leaves them out"))
        chosen.update(found)
        chosen.update(chosen_stacks)
    if not patterns:
        problems.append(Problem("lora.targets", "is empty", f"use {ALL_LINEAR}, or name modules"))
    if problems:
        raise UserError(problems)
    return [name for name in (*linears, *stacks) if name in chosen]


def shortest_patterns(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """The ends of names ("q_proj") that choose exactly `names` under PEFT's rule, else the full names, sorted.

    Other tools read an adapter's targets more easily as short names.
    """
    ends = {_end(name) for name in names}
    chosen = {name for name, _ in model.named_modules() if _end(name) in ends}
    return sorted(ends if chosen == set(names) else names)


def unnameable(model: PreTrainedModel) -> set[str]:
    """Ends of names of linears that a PEFT configuration can't mean on this model.

    Where transformers 5 stores experts as plain tensors, PEFT reads the names that their linears once had
    (`gate_proj`, ...) as those tensors. Dense and shared MLPs of the same names can't be targets then: PEFT would load
    such an adapter wrongly.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # A PEFT that doesn't convert.
        return set()
    changed = set()
    for end in {_end(name) for name, module in model.named_modules() if is_linear(module)}:
        config = LoraConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # Named without its fused partner.
            changed.add(end)
        if config.target_modules != {end}:
            changed.add(end)
    return changed


def left_out(model: PreTrainedModel, targets: str | Sequence[str] = ALL_LINEAR) -> list[str]:
    """What "all-linear" leaves without an adapter although one might expect it there, as sentences for the user.

    Args:
        model: without adapters.
        targets: as for `choose_targets`; names that were chosen by hand leave nothing out unsaid.
    """
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if ALL_LINEAR not in patterns:
        return []
    prefix, _ = decoder_layers(model)
    said: list[str] = []
    refused = unnameable(model)
    lost = [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{prefix}.") and is_linear(module) and _end(name) in refused
    ]
    if lost:
        ends = ", ".join(sorted({_end(name) for name in lost}))
        said.append(
            f"{len(lost)} linears of dense and shared MLPs ({ends}) get no adapter: on {model.config.model_type}, "
            "PEFT takes these names for experts and would load such an adapter wrongly"
        )
    stacks = [name for name in find_stacks(model) if name.startswith(f"{prefix}.")]
    untold = [name for name in stacks if not any(_means_stack(pattern, name, strict=False) for pattern in patterns)]
    if untold:
        module = untold[0].rsplit(".", 2)[-2]
        reason = f"their weights are {len(untold)} stacked tensors, not linears"
        said.append(f"experts get no adapter: {reason} (to adapt them: lora.targets [{ALL_LINEAR}, {module}])")
    if packed := sum(isinstance(module, PackedExperts) for module in model.modules()):
        said.append(f"experts get no adapter: PEFT adapts plain tensors alone, and theirs are {packed} packed ones")
    return said


def decoder_layers(model: PreTrainedModel) -> tuple[str, int]:
    """Name of the list that holds the decoder layers, and how many there are."""
    decoder = model.get_decoder()
    lists = {id(module): name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    inside = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        if not inside:
            raise UserError(Problem("model", f"{type(model).__name__} has no list of decoder layers"))
        layers = max(inside, key=len)
    return lists[id(layers)], len(layers)


def is_linear(module: nn.Module) -> bool:
    """A linear layer, quantised or not: it says how many features come in and go out, and has no adapter yet."""
    if isinstance(module, nn.Linear | Conv1D):
        return True
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return all(isinstance(size, int) for size in sizes) and next(module.children(), None) is None


def _layer_numbers(layers: str | Sequence[int], count: int) -> set[int]:
    place = "lora.layers"
    fix = "use all, last N, or a list of layer numbers"
    if isinstance(layers, str):
        if layers == "all":
            return set(range(count))
        match = re.fullmatch(r"last\s+(\d+)", layers.strip())
        if not match:
            raise UserError(Problem(place, f"{layers!r} is unknown", fix))
        last = int(match[1])
        if not 1 <= last <= count:
            raise UserError(Problem(place, f"{layers!r}: the model has {count} layers", fix))
        return set(range(count - last, count))
    wrong = [number for number in layers if not -count <= number < count]
    if wrong or not layers:
        reason = f"the model has {count} layers, and no layer {wrong[0]}" if wrong else "is empty"
        raise UserError(Problem(place, reason, fix))
    return {number % count for number in layers}


def _end(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None


def _means_stack(pattern: str, name: str, strict: bool = True) -> bool:
    """Whether a pattern means a stack of experts, by its own name or its module's.

    Args:
        strict: raise re.error for what is no regular expression.
    """
    try:
        return _matches(pattern, name) or _matches(pattern, name.rpartition(".")[0])
    except re.error:
        if strict:
            raise
        return False


def _first_refusal(model: PreTrainedModel, pattern: str, prefix: str, linears: Sequence[str]) -> Problem | None:
    """Why a pattern can't be served: it names something that can't be adapted, or nothing at all.

    Args:
        linears: names to offer when the pattern matches nothing; empty when it matched a linear already.
    """
    place = f"lora.targets: {pattern}"
    matched = [(name, module) for name, module in model.named_modules() if name and _matches(pattern, name)]
    for name, module in matched:
        if module is model.get_output_embeddings() or module is model.get_input_embeddings():
            what = "the output head" if module is model.get_output_embeddings() else "the embedding"
            return Problem(place, f"{name} is {what}, which takes no adapter", "target linears of the layers")
        if is_linear(module) and not name.startswith(f"{prefix}."):
            return Problem(place, f"{name} lies outside the decoder layers", "target linears of the layers")
    if not linears:
        return None
    if any(name.startswith(f"{prefix}.") and is_linear(module) for name, module in matched):
        return Problem(place, "matches no linear in the chosen layers", "see lora.layers")
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedExperts)]
    if any(_means_stack(pattern, name) for name, _ in packed):
        reason = "these experts are packed, and PEFT adapts plain tensors alone"
        return Problem(place, reason, "leave them out, or use the plain model")
    if matched:
        name, module = matched[0]
        return Problem(
            place, f"{name} is a {type(module).__name__}, not a linear", f"use {ALL_LINEAR}, or name linears"
        )
    ends = sorted({_end(name) for name in linears})
    near = difflib.get_close_matches(pattern.rsplit(".", 1)[-1], ends, n=3, cutoff=0.4) or ends
    return Problem(place, "matches no module", f"did you mean {', '.join(near)}?")
