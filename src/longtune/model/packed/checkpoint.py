"""An MLX checkpoint on disk: its configuration, its memory-mapped tensors, and which module has which format.

Reads only. Putting the tensors into a transformers model is the work of `loader`; what formats mean is in `formats`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from longtune.errors import Problem, UserError
from longtune.model.packed.formats import Format

_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_QUANTISATION = ("quantization", "quantization_config")
_DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and group size where an entry names none."""


def decode_floats(value: Any) -> Any:
    """JSON values with {"__float__": "Infinity"} turned into the floats that JSON has no word for."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in _TAGGED:
            return _TAGGED[value["__float__"]]
        return {key: decode_floats(inner) for key, inner in value.items()}
    return [decode_floats(inner) for inner in value] if isinstance(value, list) else value


def encode_floats(value: Any) -> Any:
    """The other way, so that a written config is valid JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: encode_floats(inner) for key, inner in value.items()}
    return [encode_floats(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json with its floats decoded.

    Raises:
        UserError: it can't be read.
    """
    file = folder / "config.json"
    try:
        values = decode_floats(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(Problem(str(file), f"can't be read ({error})", "download it again")) from None
    if not isinstance(values, dict):
        raise UserError(Problem(str(file), "holds no keys", "download it again"))
    for key in _QUANTISATION:
        if not isinstance(values.get(key), dict | None):
            raise UserError(Problem(f"{file}: {key}", f"is {values[key]!r:.60}, no mapping", "download it again"))
    return values


def check_quantisation(quantisation: dict[str, Any], folder: Path) -> None:
    """Refuse a width, a group or a mode for all modules that there is not.

    Raises:
        UserError: naming config.json.
    """
    try:
        _as_format(quantisation)
    except ValueError as error:
        raise UserError(Problem(f"{folder / 'config.json'}: quantization", str(error), "download it again")) from None


def quantisation_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The MLX quantisation of a config, or None where it has none (or one of another library)."""
    for owner in (config, config.get("text_config")):
        for key in _QUANTISATION:
            found = owner.get(key) if isinstance(owner, dict) else None
            if isinstance(found, dict) and "quant_method" not in found and {"bits", "group_size", "mode"} & set(found):
                return found
    return None


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model, as transformers knows it."""
    left = {key: value for key, value in config.items() if key not in _QUANTISATION}
    if isinstance(left.get("text_config"), dict):
        left["text_config"] = without_quantisation(left["text_config"])
    return left


def is_mlx(folder: Path) -> bool:
    """Whether a model folder is an MLX checkpoint: by its config, or by the note in its weights."""
    try:
        if quantisation_of(read_config(folder)) is not None:
            return True
    except UserError:
        return False
    for file in sorted(folder.glob("model*.safetensors"))[:1]:
        try:
            with safe_open(file, framework="pt") as opened:
                return (opened.metadata() or {}).get("format") == "mlx"
        except (SafetensorError, OSError):
            return False
    return False


class Shards:
    """The tensors of all safetensors files of a folder, by name; read when asked for, mapped from the file.

    Use as a context.

    Raises:
        UserError: a file that is not whole, a tensor in two files, or one that the index lists and no file holds.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Shards:
        files = sorted(self.folder.glob("model*.safetensors")) or sorted(self.folder.glob("*.safetensors"))
        problems: list[Problem] = []
        for file in files:
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                problems.append(Problem(str(file), f"is no whole safetensors file ({error})", "download it again"))
                continue
            self._files[file.name] = opened
            for name in opened.keys():
                if name in self._names:
                    problems.append(Problem(f"{file.name}: {name}", f"is in {self._names[name]}, too"))
                self._names[name] = file.name
        index = self.folder / "model.safetensors.index.json"
        if index.is_file() and not problems:
            try:
                listed = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                problems.append(Problem(str(index), f"can't be read ({error})", "download it again"))
            else:
                lost = sorted(set(listed) - set(self._names))
                problems += [
                    Problem(f"{listed[name]}: {name}", "the index lists it, no file holds it") for name in lost
                ]
        if problems:
            self._stack.close()
            raise UserError(shortened(problems))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def place(self, name: str) -> str:
        """Where a tensor is, for messages."""
        return f"{self._names.get(name, self.folder)}: {name}"

    def shape(self, name: str) -> list[int]:
        return list(self._files[self._names[name]].get_slice(name).get_shape())

    def is_integer(self, name: str) -> bool:
        """Whether a tensor is there that holds integers."""
        return name in self and self._files[self._names[name]].get_slice(name).get_dtype().startswith(("U", "I"))

    def get(self, name: str) -> torch.Tensor:
        """A tensor, its memory being the file's until it is written to or moved."""
        try:
            return self._files[self._names[name]].get_tensor(name)
        except SafetensorError as error:
            raise UserError(Problem(self.place(name), f"can't be read ({error})", "download it again")) from None

    def find(self, name: str) -> torch.Tensor | None:
        return self.get(name) if name in self else None


def format_of(path: str, columns: int, shards: Shards, quantisation: dict[str, Any]) -> Format | None:
    """The format of one module's weight, or None where it is plain.

    A module that is listed in the config is what its entry says. One that isn't is packed if it has scales; their shape
    and dtype tell how.

    Args:
        path: the module's name in the file. columns: numbers of a row (inputs of a linear).

    Raises:
        ValueError: an unknown mode or width, or shapes that fit none; what is wrong is said without the name.
    """
    entry = quantisation.get(path)
    if entry is False:
        return None
    if entry is True:
        entry = quantisation
    if isinstance(entry, dict):
        return _as_format(entry)
    if entry is not None:
        raise ValueError(f"its entry in the config is {entry!r}, neither a format nor false")
    if f"{path}.scales" not in shards:
        if shards.is_integer(f"{path}.weight"):
            raise ValueError(f"is packed, and {path}.scales is missing")
        return None
    shapes = shards.shape(f"{path}.scales"), shards.shape(f"{path}.weight")
    if not (shapes[0] and shapes[1] and columns):
        raise ValueError(f"scales of {shapes[0]} and words of {shapes[1]} are no packed rows of {columns}")
    groups, words = shapes[0][-1], shapes[1][-1]
    if not groups or columns % groups:
        raise ValueError(f"{groups} scales don't divide a row of {columns}")
    if words * 32 % columns:
        raise ValueError(f"{words} words of 32 bits are no whole number of bits for each of {columns} numbers")
    group, bits = columns // groups, words * 32 // columns
    mode = "affine"
    if shards.get(f"{path}.scales").dtype == torch.uint8:
        mode = "mxfp8" if bits == 8 else "nvfp4" if group == 16 else "mxfp4"
    return Format(mode, bits, group)


def _as_format(entry: dict[str, Any]) -> Format:
    """The format of an entry of the config; ValueError where it is none."""
    mode = entry.get("mode") or "affine"
    default = dict(zip(("bits", "group_size"), _DEFAULTS.get(str(mode), (0, 0)), strict=True))
    sizes = []
    for key in ("bits", "group_size"):
        value = entry.get(key, default[key])
        if value is None:
            value = default[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise ValueError(f"{key} is {value!r}, no whole number")
        sizes.append(int(value))
    return Format(cast(Any, mode), *sizes)


def shortened(problems: list[Problem], shown: int = 10) -> list[Problem]:
    more = len(problems) - shown
    return problems if more <= 0 else [*problems[:shown], Problem("and", f"{more} more")]
