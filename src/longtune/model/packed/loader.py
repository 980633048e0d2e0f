"""An MLX checkpoint as a transformers model whose weights stay packed.

The architecture is transformers' own, made without memory; its linears, embeddings and expert stacks are replaced by
packed ones where the file has them packed, and every other tensor is put in its place, memory-mapped on the CPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from longtune.errors import Problem, UserError
from longtune.model.packed.checkpoint import (
    Shards,
    check_quantisation,
    format_of,
    quantisation_of,
    read_config,
    shortened,
    without_quantisation,
)
from longtune.model.packed.formats import Format
from longtune.model.packed.modules import PackedEmbedding, PackedExperts, PackedLinear, PackedWeight, TiedHead

_TEXT_PREFIX = "language_model."
"""What image models put before the names of their language model."""

_PACKED_PARTS = ("scales", "biases", "global_scale")
_STACKS = ("switch_mlp", "experts")
"""MLX's names for the module that holds one tensor for all experts."""


def load_packed(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal LM of an MLX checkpoint.

    Args:
        dtype: in which it computes; plain weights are cast to it, packed ones stay as they are.

    Raises:
        UserError: every tensor that is missing, left over, or of another shape or format than the config says.
    """
    config = read_config(folder)
    quantisation = quantisation_of(config) or {}
    check_quantisation(quantisation, folder)
    with Shards(folder) as shards:
        prefix = _TEXT_PREFIX if any(name.startswith(_TEXT_PREFIX) for name in shards) else ""
        model = _empty_model(folder, config, text_only=bool(prefix), dtype=dtype)
        _Filling(model, shards, prefix, quantisation, dtype, device).run()
    _initialise_the_rest(model, device)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    model.requires_grad_(False)
    return model.eval()


def architecture_of(folder: Path, config: dict[str, Any], *, text_only: bool) -> Any:
    """transformers' configuration of the model; that of its language model alone for `text_only`.

    Raises:
        UserError: transformers doesn't know the architecture.
    """
    values = without_quantisation(config)
    place = str(folder / "config.json")
    kind = str(values.get("model_type"))
    if kind not in CONFIG_MAPPING:
        reason = f"transformers knows no architecture {kind!r}"
        raise UserError(Problem(place, reason, "a newer transformers may: pip install -U transformers"))
    try:
        made = CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # The classes check their fields with errors of many kinds.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(Problem(place, f"is no configuration of {kind} ({reason})")) from error
    return made.get_text_config() if text_only else made


def _empty_model(folder: Path, config: dict[str, Any], *, text_only: bool, dtype: torch.dtype) -> PreTrainedModel:
    architecture = architecture_of(folder, config, text_only=text_only)
    try:
        with torch.device("meta"):
            # Packed experts are computed one at a time, which is how transformers' eager experts ask for them.
            return AutoModelForCausalLM.from_config(architecture, dtype=dtype, experts_implementation="eager")
    except Exception as error:  # Of many kinds, as above.
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        reason = f"no causal language model of {architecture.model_type} can be made of its config.json ({why})"
        raise UserError(Problem(str(folder), reason)) from error


@dataclass(slots=True)
class _Filling:
    """One model being filled from one checkpoint."""

    model: PreTrainedModel
    shards: Shards
    prefix: str
    quantisation: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    used: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def run(self) -> None:
        names = self._names()
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        for path, module in list(modules.items()):
            if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
                self._fill_experts(path, module, names)
            elif isinstance(module, nn.Linear | nn.Embedding) and (found := names.get(f"{path}.weight")):
                self._fill_matrix(path, module, found.removesuffix(".weight"))
        self._fill_plain(names)
        self._tie(modules)
        self._report()

    def _names(self) -> dict[str, str]:
        """The file's name of each tensor, by the name that it has in the model."""
        renamings = [
            transform for transform in _conversions(self.model) if type(transform).__name__ == "WeightRenaming"
        ]
        targets = set(dict(self.model.named_parameters(remove_duplicate=False)))
        targets |= {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        names = {}
        for name in self.shards:
            if not name.startswith(self.prefix):
                continue
            ours = name.removeprefix(self.prefix)
            if ours not in targets:
                for renaming in renamings:
                    ours, _ = renaming.rename_source_key(ours)
            names[ours] = name
        return names

    def _fill_matrix(self, path: str, module: nn.Linear | nn.Embedding, there: str) -> None:
        """A linear or an embedding: replaced where it is packed, left to `_fill_plain` where it is plain."""
        rows, columns = module.weight.shape
        try:
            format = format_of(there, columns, self.shards, self.quantisation)
        except ValueError as error:
            self._problem(f"{there}.weight", str(error))
            self.filled |= {f"{path}.weight", f"{path}.bias"}
            return
        if format is None:
            return
        self.filled |= {f"{path}.weight", f"{path}.bias"}
        made = self._packed(there, format, [rows], columns, _class_of(module), module)
        if made is not None:
            self.model.set_submodule(path, made)

    def _packed(
        self, there: str, format: Format, leading: list[int], columns: int, kind: type[PackedWeight], module: Any
    ) -> PackedWeight | None:
        """A packed module of the tensors under a name in the file; None after a problem."""
        names = {part: f"{there}.{part}" for part in ("weight", *_PACKED_PARTS)}
        parts = {part: self._take(name) for part, name in names.items()}
        wanted = ["scales", *(["biases"] if format.mode == "affine" else [])]
        lost = [names[part] for part in wanted if parts[part] is None]
        if lost:
            for name in lost:
                self._problem(name, f"is missing ({there}.weight is packed as {format})")
            return None
        extra: dict[str, Any] = {}
        if kind is PackedLinear and module.bias is not None:
            extra["bias"] = self._take(f"{there}.bias", cast=True)
            if extra["bias"] is None:
                self._problem(f"{there}.bias", "is missing")
        if kind is PackedEmbedding:
            extra = _embedding_extras(module)
        weight, scales = cast(torch.Tensor, parts["weight"]), cast(torch.Tensor, parts["scales"])
        for part in ("scales", "biases", "global_scale"):
            found = parts[part]
            if found is None or found.is_meta or not found.is_floating_point():
                continue
            if not bool(found.isfinite().all()):
                self._problem(names[part], "holds values that are not finite")
                return None
        if list(weight.shape[:-1]) != leading:
            self._problem(names["weight"], f"has rows {list(weight.shape[:-1])}, the config says {leading}")
            return None
        try:
            return kind(
                format,
                columns,
                weight,
                scales,
                parts["biases"],
                parts["global_scale"],
                compute_dtype=self.dtype,
                **extra,
            )
        except ValueError as error:
            self._problem(names["weight"], str(error))
            return None

    def _fill_experts(self, path: str, module: Any, names: dict[str, str]) -> None:
        """A stack of experts: MLX keeps gate, up and down apart, each [E, out, in]."""
        there = self._find_stack(path, names)
        self.filled |= {f"{path}.{name}{end}" for name in ("gate_up_proj", "down_proj") for end in ("", "_bias")}
        if there is None:
            self._problem(path, f"no tensor for its experts is there ({' or '.join(_STACKS)}, with gate_proj.weight)")
            return
        sizes = {name: list(getattr(module, name).shape) for name in ("gate_up_proj", "down_proj")}
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            shape = sizes[name]
            experts, rows, columns = shape if not module.is_transposed else (shape[0], shape[2], shape[1])
            weave = _Weave(len(parts) > 1 and not module.is_concatenated)
            made: list[PackedWeight] = []
            plain: list[torch.Tensor] = []
            for part in parts:
                at = f"{there}.{part}"
                try:
                    format = format_of(at, columns, self.shards, self.quantisation)
                except ValueError as error:
                    self._problem(f"{at}.weight", str(error))
                    continue
                leading = [experts, rows // len(parts)]
                if format is not None:
                    packed = self._packed(at, format, leading, columns, PackedWeight, None)
                    made += [packed] if packed is not None else []
                    continue
                tensor = self._take(f"{at}.weight", cast=True)
                if tensor is None:
                    self._problem(f"{at}.weight", "is missing")
                elif list(tensor.shape) != [*leading, columns]:
                    self._problem(f"{at}.weight", f"is {list(tensor.shape)}, the config says {[*leading, columns]}")
                else:
                    plain.append(tensor)
            if len(made) == len(parts):
                del module._parameters[name]
                stack = PackedExperts(made, interleaved=weave.interleaved, transposed=module.is_transposed)
                module.add_module(name, stack)
            elif len(plain) == len(parts):
                whole = weave(plain, 1)
                whole = whole.transpose(1, 2).contiguous() if module.is_transposed else whole
                self._assign(f"{path}.{name}", whole)
            elif made and plain:
                self._problem(f"{there}.{parts[0]}", "is packed, and its partner is not: they share a place")
            if module.has_bias:
                self._fill_expert_bias(f"{path}.{name}_bias", [f"{there}.{part}.bias" for part in parts], weave)

    def _fill_expert_bias(self, name: str, there: list[str], weave: _Weave) -> None:
        found = [self._take(at, cast=True) for at in there]
        for at, tensor in zip(there, found, strict=True):
            if tensor is None:
                self._problem(at, "is missing")
        if all(tensor is not None for tensor in found):
            self._assign(name, weave(cast(list[torch.Tensor], found), 1))

    def _find_stack(self, path: str, names: dict[str, str]) -> str | None:
        parent = path.rpartition(".")[0]
        for name in _STACKS:
            found = names.get(f"{parent}.{name}.gate_proj.weight")
            if found is not None:
                return found.removesuffix(".gate_proj.weight")
        return None

    def _fill_plain(self, names: dict[str, str]) -> None:
        """Parameters and kept buffers that are still without memory."""
        for name, tensor in self._plain_tensors():
            if name in self.filled or name not in names:
                continue
            there = names[name]
            path = there.removesuffix(".weight")
            if tensor.ndim == 2 and path != there and f"{path}.scales" in self.shards:
                self.filled.add(name)
                found = self._unpacked(path, tensor)
            else:
                found = self._take(there, cast=tensor.is_floating_point())
            if found is None:
                continue
            self.filled.add(name)
            if found.shape != tensor.shape:
                self._problem(there, f"is {list(found.shape)}, the config says {list(tensor.shape)}")
            elif found.is_floating_point() != tensor.is_floating_point():
                self._problem(
                    there, f"is {found.dtype}, but its module is not listed as quantised".replace("torch.", "")
                )
            else:
                self._assign(name, found)

    def _unpacked(self, there: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """A packed matrix that the architecture keeps as a plain parameter (a router): too small to be kept packed."""
        rows, columns = tensor.shape
        try:
            format = format_of(there, columns, self.shards, self.quantisation)
        except ValueError as error:
            self._problem(f"{there}.weight", str(error))
            return None
        if format is None:
            return self._take(f"{there}.weight", cast=True)
        packed = self._packed(there, format, [rows], columns, PackedWeight, None)
        return None if packed is None else packed.dequantise()

    def _assign(self, name: str, value: torch.Tensor) -> None:
        self.filled.add(name)
        parent, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(parent)
        if leaf in module._parameters:
            module._parameters[leaf] = _frozen(value)
        else:
            module._buffers[leaf] = value

    def _tie(self, modules: dict[str, nn.Module]) -> None:
        """The head that the embedding serves as, where the file has none of its own."""
        head = cast(Any, self.model.get_output_embeddings())
        embedding = cast(Any, self.model.get_input_embeddings())
        path = next((path for path, module in modules.items() if module is head), None)
        tied = getattr(self.model.config.get_text_config(), "tie_word_embeddings", False)
        if path is None or not tied or f"{path}.weight" in self.filled:
            return
        if isinstance(embedding, PackedEmbedding):
            self.model.set_submodule(path, TiedHead(embedding))
        else:
            head.weight = embedding.weight

    def _plain_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters and kept buffers by name, those of packed modules left out; a shared one is named once."""
        packed = [f"{path}." for path, module in self.model.named_modules() if isinstance(module, PackedWeight)]
        named = [*self.model.named_parameters(), *_kept_buffers(self.model)]
        return [(name, tensor) for name, tensor in named if not name.startswith(tuple(packed))]

    def _take(self, name: str, cast: bool = False) -> torch.Tensor | None:
        """A tensor of the file on its device, in the compute dtype for `cast`; None where there is none."""
        tensor = self.shards.find(name)
        if tensor is None:
            return None
        self.used.add(name)
        if cast and tensor.is_floating_point():
            return tensor.to(self.device, self.dtype)
        return tensor.to(self.device)

    def _problem(self, name: str, reason: str) -> None:
        self.problems.append(Problem(self.shards.place(name), reason))
        # Its parts are not left over: one problem for one weight.
        path = name.rpartition(".")[0]
        self.used.update(f"{path}.{part}" for part in ("weight", "bias", *_PACKED_PARTS))

    def _report(self) -> None:
        for name, _ in self._plain_tensors():
            if name not in self.filled:
                self.problems.append(Problem(f"{self.shards.folder}: {self.prefix}{name}", "is missing"))
        ignored = [re.compile(p) for p in getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or []]
        for name in self.shards:
            left = name.startswith(self.prefix) and name not in self.used and not name.endswith("rotary_emb.inv_freq")
            if left and not any(pattern.search(name) for pattern in ignored):
                self.problems.append(Problem(self.shards.place(name), "has no place in the model that the config says"))
        if self.problems:
            raise UserError(shortened(self.problems))


@dataclass(frozen=True, slots=True)
class _Weave:
    """Lays gate and up side by side, or row by row in turn."""

    interleaved: bool

    def __call__(self, tensors: list[torch.Tensor], axis: int) -> torch.Tensor:
        if len(tensors) == 1:
            return tensors[0]
        if self.interleaved:
            return torch.stack(tensors, axis + 1).flatten(axis, axis + 1)
        return torch.cat(tensors, axis)


def _class_of(module: nn.Module) -> type[PackedWeight]:
    return PackedEmbedding if isinstance(module, nn.Embedding) else PackedLinear


def _embedding_extras(module: Any) -> dict[str, Any]:
    """What an architecture's embedding does beside looking up."""
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    if type(module) is not nn.Embedding and scale is None:
        raise UserError(Problem(type(module).__name__, "an embedding of this kind can't be packed"))
    return {"padding_idx": module.padding_idx, "scale": None if scale is None else torch.tensor(float(scale))}


def _conversions(model: PreTrainedModel) -> list[Any]:
    """transformers' rules for names of checkpoints that differ from those of the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _kept_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that belong to a checkpoint."""
    found = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.append((f"{path}.{name}" if path else name, buffer))
    return found


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _initialise_the_rest(model: PreTrainedModel, device: torch.device) -> None:
    """Values of the buffers that no checkpoint holds (rotary frequencies, ...), as transformers computes them."""
    if device.type == "meta":
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    loaded = [*model.parameters(), *(buffer for _, buffer in _kept_buffers(model))]
    for tensor in loaded:
        cast(Any, tensor)._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    for tensor in loaded:
        del cast(Any, tensor)._is_hf_initialized
