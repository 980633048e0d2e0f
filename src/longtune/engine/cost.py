"""Seconds of a step from the work that a trace counted and the rates of a device.

A phase takes what its arithmetic, its memory traffic and its attention take one after another, or what launching its
operations takes, whichever is longer. Copies to and from the host run beside it and count only where they are longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longtune.engine.devices import Device
from longtune.engine.forecast import Forecast
from longtune.engine.workspace import Work

PINNING = 3.5e9
"""Bytes of host memory pinned per second, at the first step (measured: 9 to 28 s for 32 to 64 GiB)."""

STEP = 0.05
"""Seconds that a step on CUDA takes besides its walk: the optimiser, the row's tables, the loss (measured)."""

COMPILED = 0.67
"""Memory traffic of compiled layers, of what it is otherwise: element-wise operations are fused. From steps on an H200
(8B shape, 32,768 tokens: 5.8 s and compiled 5.2 s, with a later engine 4.62 and 4.36 s, which would be 0.57 and 0.77);
what launching takes is taken to stay as it is."""

COMPILING = 40.0
"""Seconds that compiling the layers takes for each chunk size, nothing of it being there from earlier (measured: the
first step at 32,768 tokens takes 43 to 47 s with it, 10 s without)."""

COMPILING_ANY = 90.0
"""The same once for all sizes, as rows of one chunk are (measured: 50 to 94 s)."""

DISK = 1.5e9
"""Bytes per second of a disk for boundaries, where nothing is known of it."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one micro-batch.

    Attributes:
        products, attention, memory, launches, copies: matrix products; attention; reading and writing device memory;
            what waiting for launches adds; what waiting for copies adds.
        first: what the first step takes more.
    """

    products: float
    attention: float
    memory: float
    launches: float
    copies: float
    first: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.launches + self.copies


def compiling_pays(eager: float, compiled: float, steps: int, any_size: bool = False) -> bool:
    """Whether compiling the layers makes a run shorter.

    Args:
        eager, compiled: predicted seconds of a step (`Prediction.seconds`, `Prediction.compiled`).
        steps: of the run, or what is left of it.
        any_size: they are compiled once for all sizes, instead of for one chunk size.
    """
    return steps * (eager - compiled) > (COMPILING_ANY if any_size else COMPILING)


def seconds(forecast: Forecast, device: Device, compiled: bool = False) -> Seconds:
    """Seconds of a micro-batch on a device.

    Args:
        compiled: the layers run through `torch.compile` (on CUDA).
    """
    found = Seconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for phase, work in forecast.work.items():
        fused = compiled and phase in ("forward", "backward")
        found = _plus(found, _phase(replace(work, moved=COMPILED * work.moved) if fused else work, device))
    host, disk = forecast.away.get("host", 0), forecast.away.get("disk", 0)
    # Once out and once back.
    copying = 2 * host / device.link + 2 * disk / min(device.link, DISK)
    if device.kind != "cuda":
        return _plus(found, Seconds(0.0, 0.0, 0.0, 0.0, copying, 0.0))
    late = max(0.0, copying - found.total)
    return _plus(found, Seconds(0.0, 0.0, 0.0, STEP, late, host / PINNING))


def _phase(work: Work, device: Device) -> Seconds:
    products = work.products / device.products
    # Two products forward, five backward (the scores are made again).
    attention = 2 * work.forward / device.forward + 5 * work.backward / device.backward
    arithmetic, reading = work.thin_products / device.products, work.thin_bytes / device.bandwidth
    if arithmetic > reading:
        products += arithmetic  # As on most CPUs.
        reading = 0.0
    memory = work.moved / device.bandwidth + reading
    launching = work.launches * device.launch
    if device.kind == "cpu":
        return Seconds(products, attention, memory, launching, 0.0, 0.0)
    late = max(0.0, launching - products - attention - memory)
    return Seconds(products, attention, memory, late, 0.0, 0.0)


def _plus(a: Seconds, b: Seconds) -> Seconds:
    return Seconds(*(getattr(a, name) + getattr(b, name) for name in Seconds.__slots__))
