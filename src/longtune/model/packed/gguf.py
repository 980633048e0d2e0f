"""The widths in which a GGUF file stores its tensors, noted on the modules that transformers dequantised them into.

transformers keeps GGUF weights dense; what is remembered here lets rank policies follow the file's widths. The header
is read in some milliseconds: the `gguf` package, whose tables of names are used, would decode the vocabulary first.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

from torch import nn

from longtune.model.packed.storage import remember_bits

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def remember_gguf_bits(model: nn.Module, file: Path, layers: int) -> int:
    """Note each module's width, as the tensor type's name says it (Q4_K: 4 bits; scales aren't counted).

    Args:
        model: as transformers loaded it. file: the GGUF file. layers: decoder layers of the model.

    Returns:
        how many modules were found in the file; 0 where the `gguf` package has no names for this architecture.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name, widths = read_widths(file)
    architecture = next((key for key, value in MODEL_ARCH_NAMES.items() if value == name), None)
    if architecture is None:
        return 0
    names = get_tensor_name_map(architecture, layers)
    found = 0
    for path, module in model.named_modules():
        if "weight" not in module._parameters or not (there := names.get_name(path)):
            continue
        width = widths.get(f"{there}.weight")
        if width is not None:
            remember_bits(module, width)
            found += 1
    return found


def read_widths(file: Path) -> tuple[str | None, dict[str, float]]:
    """(architecture, bits by tensor name) of a GGUF file's header.

    Raises:
        ValueError: the file is no GGUF file. struct.error: it ends inside its header.
    """
    from gguf import GGMLQuantizationType

    with file.open("rb") as stream:
        magic, _, tensors, pairs = _read(stream, "<4sIQQ")
        if magic != b"GGUF":
            raise ValueError(f"{file} is no GGUF file")
        architecture = None
        for _ in range(pairs):
            key = _text(stream)
            value = _value(stream, _read(stream, "<I")[0])
            if key == "general.architecture":
                architecture = value
        widths = {}
        for _ in range(tensors):
            name = _text(stream)
            _read(stream, f"<{_read(stream, '<I')[0]}Q")
            kind, _ = _read(stream, "<IQ")
            width = width_of(GGMLQuantizationType(kind).name)
            if width is not None:
                widths[name] = width
    return architecture, widths


def width_of(kind: str) -> float | None:
    """Bits of a GGML type by its name: Q4_K -> 4, IQ2_XXS -> 2, BF16 -> 16; None for a name without a number."""
    match = re.search(r"\d+", kind)
    return float(match[0]) if match else None


def _read(stream: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _text(stream: BinaryIO) -> str:
    return stream.read(_read(stream, "<Q")[0]).decode("utf-8", "replace")


def _value(stream: BinaryIO, kind: int) -> Any:
    """A value of the header; arrays are passed over."""
    if kind == _STRING:
        return _text(stream)
    if kind != _ARRAY:
        return _read(stream, f"<{_SCALARS[kind]}")[0]
    inner, count = _read(stream, "<IQ")
    if inner in _SCALARS:
        stream.seek(count * struct.calcsize(f"<{_SCALARS[inner]}"), 1)
        return None
    for _ in range(count):
        _value(stream, inner)
    return None
