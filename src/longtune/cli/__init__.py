"""The command line: one file per verb. A verb's heavy imports happen inside it, so that --help answers at once."""

from longtune.cli.app import app, main

__all__ = ["app", "main"]
