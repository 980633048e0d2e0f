"""`longtune demo`: a task that the project makes up, trained and measured on the embedded model in minutes."""

from longtune.demo.before_after import lines, run

__all__ = ["lines", "run"]
