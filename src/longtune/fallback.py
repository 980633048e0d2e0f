"""Whether Triton's kernels run on a device: each room tries one of its own, and falls back where they don't."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable


def fault_of(probe: Callable[[], None]) -> str | None:
    """Why Triton's kernels can't run, or None where they do.

    Args:
        probe: compiles and runs one; raises whatever is wrong.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        probe()
    except Exception as error:  # Whatever is missing (a C compiler, a driver, ...): others take its place.
        return f"triton's kernels don't run here ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]})"
    return None
