"""Files or hub -> records -> rows -> token trees, checked; and the order in which they are trained.

Knows formats, templates, masks and order; knows nothing of models beyond their tokenizer, nor of losses.
"""

from longtune.data.batching import Batcher, epoch_order
from longtune.data.dataset import Dataset, load_dataset
from longtune.data.report import Report
from longtune.data.sources import split_sources

__all__ = ["Batcher", "Dataset", "Report", "epoch_order", "load_dataset", "split_sources"]
