"""MLX's quantised formats as tensors: what the bits mean, and the plain torch dequantiser that defines the result.

Affine: a row is one little-endian, least-significant-first bit stream of `bits`-wide integers; w = q * scale + bias per
group. mxfp4, mxfp8, nvfp4: OCP microscaling floats; w = value * scale per group. Everything is computed in fp32, each
operation rounded on its own, and cast once at the end. Modules, files and kernels are the work of the neighbours.

Shapes: [*, R, W] packed 32-bit words, [*, R, G] scales and biases, R rows of C columns, G = C / group_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

import torch

Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
MODES = get_args(Mode)

AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)

_FLOAT_SHAPES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and group size: a float mode has one of each."""

NVFP4_RANGE = 448.0 * 6.0
"""Largest E4M3 scale times largest E2M1 value: what nvfp4's global scale is counted in."""

BLOCK = 1 << 22
"""Numbers that are dequantised at once, where temporaries would be as large as the result."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the numbers of one weight are stored.

    Raises:
        ValueError: there is no such format.
    """

    mode: Mode
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r} (known: {', '.join(MODES)})")
        if self.mode == "affine":
            if self.bits not in AFFINE_BITS:
                raise ValueError(f"affine has no width of {self.bits} bits (known: {', '.join(map(str, AFFINE_BITS))})")
            if self.group_size < 1:
                raise ValueError(f"a group can't have {self.group_size} numbers")
        elif (self.bits, self.group_size) != _FLOAT_SHAPES[self.mode]:
            bits, group = _FLOAT_SHAPES[self.mode]
            given = f"{self.bits} bits in groups of {self.group_size}"
            raise ValueError(f"{self.mode} is {bits} bits in groups of {group}, not {given}")

    def words(self, columns: int) -> int:
        """32-bit words of a row."""
        return -(-columns * self.bits // 32)

    def groups(self, columns: int) -> int:
        """Groups of a row; ValueError where they don't divide it."""
        if columns % self.group_size:
            raise ValueError(f"groups of {self.group_size} don't divide a row of {columns}")
        return columns // self.group_size

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit g{self.group_size}" if self.mode == "affine" else self.mode


def float_format(mode: str) -> Format:
    """The one format of a float mode."""
    return Format(cast(Mode, mode), *_FLOAT_SHAPES.get(mode, (0, 0)))


@cache
def value_table(mode: Mode) -> torch.Tensor:
    """What each code of a float mode's values stands for: fp32 [16] (E2M1) or [256] (E4M3), on the CPU."""
    if mode == "mxfp8":
        return _e4m3()
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return torch.tensor([*half, *(-x for x in half)])


@cache
def scale_table(mode: Mode) -> torch.Tensor:
    """What each byte of a float mode's scales stands for: fp32 [256], on the CPU (E8M0, or E4M3 for nvfp4)."""
    if mode == "nvfp4":
        return _e4m3()
    # E8M0's last code is no number; the oracle's arithmetic makes it infinite.
    return torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.inf])


def _e4m3() -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Integers of packed rows: [R, W] 32-bit words -> [R, columns] uint8."""
    data = words.contiguous().view(torch.uint8)
    rows = data.shape[0]
    if bits == 8:
        return data[:, :columns]
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
        codes = (data[:, :, None] >> shifts) & ((1 << bits) - 1)
        return codes.view(rows, -1)[:, :columns]
    # The smallest run of whole bytes that holds whole numbers: 8 of 3 or 5 bits, 4 of 6.
    size = math.lcm(bits, 8) // 8
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % size)).view(rows, -1, size).to(torch.int32)
    codes = []
    for offset in range(0, 8 * size, bits):
        byte, shift = divmod(offset, 8)
        code = data[:, :, byte] >> shift
        if shift + bits > 8:
            code = code | (data[:, :, byte + 1] << (8 - shift))
        codes.append((code & ((1 << bits) - 1)).to(torch.uint8))
    return torch.stack(codes, -1).view(rows, -1)[:, :columns]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The other way: [R, C] integers below 2^bits -> [R, W] int32 words, the last one filled up with zeros."""
    rows, columns = codes.shape
    unit = math.lcm(bits, 8) // bits  # Numbers of the smallest run that is whole bytes.
    padded = torch.nn.functional.pad(codes.to(torch.int32), (0, -columns % unit)).view(rows, -1, unit)
    size = unit * bits // 8
    data = torch.zeros(rows, padded.shape[1], size, dtype=torch.int32, device=codes.device)
    for index in range(unit):
        byte, shift = divmod(index * bits, 8)
        data[:, :, byte] |= (padded[:, :, index] << shift) & 255
        if shift + bits > 8:
            data[:, :, byte + 1] |= padded[:, :, index] >> (8 - shift)
    flat = data.view(rows, -1).to(torch.uint8)
    wanted = 4 * (-(-columns * bits // 32))
    flat = torch.nn.functional.pad(flat, (0, max(0, wanted - flat.shape[1])))[:, :wanted]
    return flat.contiguous().view(torch.int32)


def group_scales(format: Format, scales: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """What multiplies each group, fp32 [R, G].

    Args:
        scales: [R, G], floating (affine) or uint8 codes.
        global_scale: fp32 [R] or a scalar, for nvfp4.
    """
    if format.mode == "affine":
        return scales.float()
    wide = scale_table(format.mode).to(scales.device)[scales.int()]
    if global_scale is None:
        return wide
    return wide * (global_scale.float() / NVFP4_RANGE).reshape(-1, 1)


def dequantise_reference(
    format: Format,
    words: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` [R, C] from packed rows, block by block; see the head of this file for the arithmetic.

    Args:
        words: [R, W] 32-bit. scales: [R, G]. biases: [R, G], for affine. global_scale: fp32 [R] or a scalar.
    """
    rows, columns = out.shape
    step = max(1, BLOCK // max(columns, 1))
    groups = format.groups(columns)
    for start in range(0, rows, step):
        own = slice(start, min(start + step, rows))
        codes = unpack(words[own], format.bits, columns)
        if format.mode == "affine":
            values = codes.float()
        else:
            values = value_table(format.mode).to(codes.device)[codes.int()]
        shared = global_scale[own] if global_scale is not None and global_scale.ndim else global_scale
        values = values.view(-1, groups, format.group_size)
        values = values * group_scales(format, scales[own], shared)[:, :, None]
        if biases is not None:
            values += biases[own].float()[:, :, None]
        out[own] = values.view(-1, columns)
    return out
