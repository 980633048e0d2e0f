"""Training runs: the loop, the optimiser, validation, checkpoints and events.

`longtune.train` is both this package and the function that the package is named for, so the package can be called:
`longtune.train(config)` works whichever of the two a program imported first.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from longtune.train.loop import RunFailed
from longtune.train.run import Run, train

__all__ = ["Run", "RunFailed", "train"]


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Run:
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
