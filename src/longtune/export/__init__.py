"""Adapters for other tools, one small file for each format. What is written is read again and compared, then appears.

`run` holds the order of work; the formats know nothing of each other, and none of them trains or reads data.
"""

from longtune.export.run import FORMATS, Exported, ExportFailed, Request, export

__all__ = ["FORMATS", "ExportFailed", "Exported", "Request", "export"]
