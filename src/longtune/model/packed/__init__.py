"""Quantised bases kept packed: what is stored, what it means, and the layers that compute with it."""

from longtune.model.packed.formats import Format
from longtune.model.packed.modules import PackedEmbedding, PackedExperts, PackedLinear, PackedWeight, TiedHead
from longtune.model.packed.opened import layer_open, open_bytes
from longtune.model.packed.storage import bits_of, dequantise, is_quantised, packed_bytes, remember_bits

__all__ = [
    "Format",
    "PackedEmbedding",
    "PackedExperts",
    "PackedLinear",
    "PackedWeight",
    "TiedHead",
    "bits_of",
    "dequantise",
    "is_quantised",
    "layer_open",
    "open_bytes",
    "packed_bytes",
    "remember_bits",
]
