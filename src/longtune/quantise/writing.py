"""A quantised model as a folder in MLX's layout, which mlx-lm and longtune load; one weight is packed at a time.

Beside it `optiq/metadata.json` (the width of every module) and `optiq/sensitivity.json` (the figures behind them),
where rank policies look for them. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longtune.errors import Problem, UserError
from longtune.model.packed.checkpoint import encode_floats, read_config, without_quantisation
from longtune.model.packed.formats import Format
from longtune.model.packed.writer import ShardWriter, with_older_keys
from longtune.outputs import check_output, writing
from longtune.quantise.units import Unit
from longtune.quantise.widths import Plain, Widths, plain_part

_OWN_KEYS = ("_name_or_path", "transformers_version")


def write_checkpoint(
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    units: Sequence[Unit],
    widths: Widths,
    *,
    source: Path | None = None,
    kl: Mapping[str, Mapping[int, float]] | None = None,
    about: Mapping[str, Any] | None = None,
    on_unit: Callable[[Unit], None] | None = None,
) -> None:
    """Write the model with its units packed.

    Args:
        out: must not exist, or be an empty folder.
        model: with plain weights; unchanged.
        source: the folder the model came from: its config.json is taken as it is.
        kl: measured KL by unit and width, for optiq/sensitivity.json.
        about: more values for optiq/metadata.json.
        on_unit: called after each unit.

    Raises:
        UserError: `out` is there already, or can't be written.
    """
    check_free(out)
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        with writing(f"--out {out}"):
            work.mkdir(parents=True)
            _write_tensors(work, model, units, widths, on_unit)
            _write_config(work, model, source, widths)
            tokenizer.save_pretrained(work)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(work)
            _write_notes(work / "optiq", units, widths, kl or {}, about or {})
            if out.exists():
                out.rmdir()
            work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_free(out: Path) -> None:
    """Refuse a place that holds something, or that can't be written to.

    Raises:
        UserError: `out` is a file, or a folder that isn't empty; nothing can be made there.
    """
    place = f"--out {out}"
    check_output(out, place, folder=True)
    if out.is_dir() and any(out.iterdir()):
        raise UserError(Problem(place, "is there already", "name another folder, or remove it"))


def plain_tensors(model: PreTrainedModel, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
    """Parameters and kept buffers that no unit holds, by name; a tensor that two modules share is named once."""
    packed = {unit.parameter for unit in units}
    shared = {id(_find(model, name)) for name in packed}
    tensors: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name not in packed and id(parameter) not in shared
    }
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = buffer
    return tensors


def plain_size(model: PreTrainedModel, units: Sequence[Unit]) -> Plain:
    """What stays plain, for `widths`."""
    return plain_part(list(plain_tensors(model, units).values()))


def _find(model: nn.Module, name: str) -> torch.Tensor:
    parent, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(parent), leaf)


def _write_tensors(
    work: Path, model: PreTrainedModel, units: Sequence[Unit], widths: Widths, on_unit: Callable[[Unit], None] | None
) -> None:
    writer = ShardWriter(work)
    for unit in units:
        for name, tensor in unit.quantised(widths.formats[unit.name]).tensors(unit.name).items():
            writer.add(name, tensor)
        if on_unit is not None:
            on_unit(unit)
    for name, tensor in plain_tensors(model, units).items():
        writer.add(name, tensor)
    writer.close()


def _write_config(work: Path, model: PreTrainedModel, source: Path | None, widths: Widths) -> None:
    found = read_config(source) if source is not None else model.config.to_dict()
    config = {key: value for key, value in without_quantisation(found).items() if key not in _OWN_KEYS}
    config["tie_word_embeddings"] = bool(getattr(model.config, "tie_word_embeddings", False))
    default = _commonest(list(widths.formats.values()))
    quantisation: dict[str, Any] = _entry(default)
    # Each module is named, so that a reader needs no rule for those that aren't.
    quantisation |= {name: _entry(format) for name, format in widths.formats.items()}
    config["quantization"] = config["quantization_config"] = quantisation
    text = json.dumps(encode_floats(with_older_keys(config)), indent=2, sort_keys=True, default=str)
    (work / "config.json").write_text(text + "\n")


def _commonest(formats: list[Format]) -> Format:
    return max(formats, key=formats.count)


def _entry(format: Format) -> dict[str, Any]:
    return {"group_size": format.group_size, "bits": format.bits, "mode": format.mode}


def _write_notes(
    folder: Path,
    units: Sequence[Unit],
    widths: Widths,
    kl: Mapping[str, Mapping[int, float]],
    about: Mapping[str, Any],
) -> None:
    folder.mkdir()
    layers = {
        unit.name: {**_entry(widths.formats[unit.name]), "parameters": unit.numbers, "shape": list(unit.shape)}
        for unit in units
    }
    metadata = {**about, "bits_per_weight": widths.bits_per_weight, "per_layer": layers}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2, default=str) + "\n")
    figures = sensitivity_entries(units, kl)
    if figures:
        (folder / "sensitivity.json").write_text(json.dumps(figures, indent=2) + "\n")


def sensitivity_entries(units: Sequence[Unit], kl: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """The figures as files hold them: a list of {layer_name, sensitivities: {bits: kl}, parameters}."""
    return [
        {
            "layer_name": unit.name,
            "sensitivities": {str(bits): value for bits, value in sorted(kl[unit.name].items())},
            "parameters": unit.numbers,
        }
        for unit in units
        if kl.get(unit.name)
    ]
