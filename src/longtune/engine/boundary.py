"""Where boundaries live between forward and backward: on the device, or on the host behind asynchronous copies."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch


class Store(Protocol):
    """Keeps tensors by key. A `take` removes; `fetch` announces that a `take` will follow soon.

    A `section` has keys of its own, and what it still keeps goes with it.
    """

    def put(self, key: Hashable, tensor: torch.Tensor) -> None: ...

    def fetch(self, key: Hashable) -> None: ...

    def take(self, key: Hashable) -> torch.Tensor: ...

    def clear(self) -> None: ...

    def section(self) -> Store: ...


class DeviceStore:
    """Tensors stay where they are."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        self._kept[key] = tensor

    def fetch(self, key: Hashable) -> None:
        pass

    def take(self, key: Hashable) -> torch.Tensor:
        return self._kept.pop(key)

    def clear(self) -> None:
        self._kept.clear()

    def section(self) -> DeviceStore:
        return DeviceStore()


class HostStore:
    """Tensors move to host memory; on CUDA through pinned buffers and a stream of their own.

    Buffers are kept for the next step: pinning is slow. On the CPU the copy is an ordinary one.

    Args:
        device: where tensors come from and go back to.
    """

    def __init__(self, device: torch.device):
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._coming: dict[Hashable, tuple[torch.Tensor, Any]] = {}
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self.device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free.get((tensor.shape, tensor.dtype))
        return free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._cuda)

    def _release(self, buffer: torch.Tensor) -> None:
        self._free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        buffer = self._buffer(tensor)
        self._kept[key] = buffer
        if self._stream is None:
            buffer.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)

    def fetch(self, key: Hashable) -> None:
        if self._stream is None or key in self._coming or key not in self._kept:
            return
        buffer = self._kept[key]
        # Allocated on the computing stream, whose earlier work may still read the memory's last owner.
        tensor = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(buffer, non_blocking=True)
            self._coming[key] = (tensor, self._stream.record_event())
        tensor.record_stream(self._stream)

    def take(self, key: Hashable) -> torch.Tensor:
        if self._stream is None:
            buffer = self._kept.pop(key)
            tensor = buffer.to(self.device, copy=True)
            self._release(buffer)
            return tensor
        self.fetch(key)
        tensor, arrived = self._coming.pop(key)
        torch.cuda.current_stream(self.device).wait_event(arrived)
        # The next writer of this buffer works on the same stream, behind the copy that reads it.
        self._release(self._kept.pop(key))
        return tensor

    def clear(self) -> None:
        for buffer in self._kept.values():
            self._release(buffer)
        self._kept.clear()
        self._coming.clear()

    def section(self) -> HostStore:
        """The buffers and the stream are shared."""
        other = HostStore.__new__(HostStore)
        other.device, other._cuda, other._stream, other._free = self.device, self._cuda, self._stream, self._free
        other._kept, other._coming = {}, {}
        return other

    def __del__(self) -> None:
        # A forward whose backward never came must not take its buffers along: pinned memory is scarce.
        self.clear()


def make_store(kind: str, device: torch.device) -> Store:
    """The store that a plan names."""
    return HostStore(device) if kind == "host" else DeviceStore()
