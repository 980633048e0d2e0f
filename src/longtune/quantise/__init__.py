"""Which modules of a model may lose precision: measuring it, choosing widths by it, writing the quantised model."""

from longtune.quantise.sensitivity import Sample, measure, samples_of
from longtune.quantise.units import Unit, find_units
from longtune.quantise.widths import Widths, choose_widths, uniform_widths
from longtune.quantise.writing import write_checkpoint

__all__ = [
    "Sample",
    "Unit",
    "Widths",
    "choose_widths",
    "find_units",
    "measure",
    "samples_of",
    "uniform_widths",
    "write_checkpoint",
]
