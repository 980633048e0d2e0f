"""Renderers of a run's events. They never touch training: each is a function of the lines of metrics.jsonl."""

from longtune.watch.log import clean, read_events
from longtune.watch.progress import ProgressLine
from longtune.watch.view import View

__all__ = ["ProgressLine", "View", "clean", "read_events"]
