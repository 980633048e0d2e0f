"""Where tensors wait between forward and backward: on the device, in host memory, or on disk.

Off the device, copies run beside the computation on two streams of their own, one for each way. A tensor on its way out
is held until its copy is done, but never more than `RING` of them: the computing stream then waits for the oldest. A
tensor on its way in is announced by `fetch`. Off-device memory is carved from slabs that are kept for the next step.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from longtune.errors import DoesNotFit, Problem

RING = 2
"""Tensors on their way out that may still occupy device memory."""

_SMALLEST_SLAB = 64 << 20
_LARGEST_SLAB = 1 << 30
_ALIGNMENT = 4096


class Store(Protocol):
    """Keeps tensors by key. `read` leaves a tensor in the store, `take` removes it, `drop` too without asking for it;
    `fetch` announces a `read` or `take`.

    A `section` has keys of its own, and what it still keeps goes with it.
    """

    def put(self, key: Hashable, tensor: torch.Tensor) -> None: ...

    def fetch(self, key: Hashable) -> None: ...

    def read(self, key: Hashable) -> torch.Tensor: ...

    def take(self, key: Hashable) -> torch.Tensor: ...

    def drop(self, key: Hashable) -> None: ...

    def clear(self) -> None: ...

    def section(self) -> Store: ...

    def close(self) -> None: ...


class DeviceStore:
    """Tensors stay where they are."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        self._kept[key] = tensor

    def fetch(self, key: Hashable) -> None:
        pass

    def read(self, key: Hashable) -> torch.Tensor:
        return self._kept[key]

    def take(self, key: Hashable) -> torch.Tensor:
        return self._kept.pop(key)

    def drop(self, key: Hashable) -> None:
        self._kept.pop(key, None)

    def clear(self) -> None:
        self._kept.clear()

    def section(self) -> DeviceStore:
        return DeviceStore()

    def close(self) -> None:
        self.clear()


class Arena:
    """Byte buffers carved from slabs. Slabs stay until `close`; they are carved anew whenever no buffer is out.

    Rows of any lengths therefore cost no more than the largest one did.

    Args:
        slab: makes a slab of a number of bytes (uint8, one dimension).
    """

    def __init__(self, slab: Callable[[int], torch.Tensor]):
        self._make = slab
        self._slabs: list[torch.Tensor] = []
        self._free: dict[int, list[torch.Tensor]] = {}
        self._current = 0
        self._used = 0
        self._out = 0

    @property
    def bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() for slab in self._slabs)

    def get(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes (uint8)."""
        self._out += 1
        if free := self._free.get(size):
            return free.pop()
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        while self._current < len(self._slabs):
            slab = self._slabs[self._current]
            if self._used + room <= slab.numel():
                buffer = slab[self._used : self._used + size]
                self._used += room
                return buffer
            self._current, self._used = self._current + 1, 0
        grown = min(max(self.bytes, _SMALLEST_SLAB), _LARGEST_SLAB)
        try:
            self._slabs.append(self._make(grown if room <= grown else 1 << (room - 1).bit_length()))
        except BaseException:
            self._out -= 1
            raise
        self._used = room
        return self._slabs[self._current][:size]

    def give_back(self, buffer: torch.Tensor) -> None:
        """The next user must be ordered behind the last one."""
        self._out -= 1
        if self._out:
            self._free.setdefault(buffer.numel(), []).append(buffer)
        else:
            self._free.clear()
            self._current = self._used = 0

    def close(self) -> None:
        """Forget the slabs. Buffers that are still out keep theirs, and may still come back."""
        self._free.clear()
        self._slabs.clear()
        self._current = self._used = 0


def _pages(size: int) -> mmap.mmap:
    """`size` bytes of host memory, in large pages where the system has them; a page is taken when first touched."""
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A system without large pages says so.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _pin(memory: torch.Tensor, pages: mmap.mmap) -> str | None:
    """Pin host memory for CUDA until the tensor is gone; the reason if it fails.

    The pages are touched by several threads first: one alone, as in torch's own pinned allocator, is slow.
    """
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(torch.Tensor.zero_, memory.chunk(workers)))
    runtime = cast(Any, torch.cuda.cudart())
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) != 0:
        return str(error)

    def unpin(address: int, mapped: mmap.mmap) -> None:
        runtime.cudaHostUnregister(address)  # `mapped` holds the memory until then.

    weakref.finalize(memory.untyped_storage(), unpin, memory.data_ptr(), pages).atexit = False
    return None


@dataclass(slots=True)
class _Kept:
    """A tensor in a buffer. On CUDA: when it is written, and how many copies in had been asked for after its last."""

    buffer: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    written: Any = None
    read: int = 0

    def view(self) -> torch.Tensor:
        return self.buffer.view(self.dtype).view(self.shape)


class _Streams:
    """The way out and the way in of a store on CUDA."""

    def __init__(self, device: torch.device):
        self.out, self.into = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._copies = 0
        """Copies in so far."""
        self._freed = 0
        """The last copy in from a buffer that is free now."""
        self._awaited = 0
        """The last copy in that the way out has waited for."""
        self._events: deque[tuple[int, Any]] = deque()

    def came(self) -> tuple[int, Any]:
        """Number and event of the copy in that was just asked for (call under the stream)."""
        self._copies += 1
        event = self.into.record_event()
        self._events.append((self._copies, event))
        return self._copies, event

    def free(self, copy: int) -> None:
        """A buffer whose last copy in was number `copy` may be written again."""
        self._freed = max(self._freed, copy)

    def before_writing(self) -> None:
        """Order the way out behind the copies in from the buffers that are free."""
        if self._freed <= self._awaited:
            return
        event = None
        while self._events and self._events[0][0] <= self._freed:
            event = self._events.popleft()[1]
        if event is not None:
            self.out.wait_event(event)
        self._awaited = self._freed


class HostStore:
    """Tensors move to host memory; on CUDA through pinned slabs and streams of their own.

    Where pinning fails, ordinary memory is used and a warning says so. On the CPU a copy is an ordinary one.

    Args:
        device: where tensors come from and go back to.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._cuda = device.type == "cuda"
        self._streams = _Streams(device) if self._cuda else None
        self._arena = Arena(self._slab)
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._begin()

    def _begin(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}
        self._coming: dict[Hashable, tuple[torch.Tensor, Any]] = {}

    def _slab(self, size: int) -> torch.Tensor:
        try:
            pages = _pages(size)
        except OSError as error:
            fix = "raise memory.layers_per_segment, set memory.keep: nothing, or boundary_store: disk"
            raise DoesNotFit(Problem("host memory", f"no {size:,} bytes for boundaries", fix)) from error
        slab = torch.frombuffer(pages, dtype=torch.uint8)
        if self._cuda and (failed := _pin(slab, pages)):
            warnings.warn(f"host memory could not be pinned ({failed}): copies will be slow", stacklevel=2)
        return slab

    @property
    def bytes(self) -> int:
        """Host bytes held, in use or not."""
        return self._arena.bytes

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        kept = _Kept(self._arena.get(tensor.numel() * tensor.element_size()), tensor.shape, tensor.dtype)
        self._kept[key] = kept
        kept.written = self._copy_out(tensor, kept.view())

    def _copy_out(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Any:
        if self._streams is None:
            buffer.copy_(tensor)
            return None
        out = self._streams.out
        self._streams.before_writing()
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            buffer.copy_(tensor, non_blocking=True)
            left = out.record_event()
        # Held instead of `record_stream`: its memory then goes back in the order of the computing stream.
        self._leaving.append((tensor, left))
        while len(self._leaving) > RING:
            torch.cuda.current_stream(self.device).wait_event(self._leaving.popleft()[1])
        return left

    def fetch(self, key: Hashable) -> None:
        if self._streams is None or key in self._coming or key not in self._kept:
            return
        kept, into = self._kept[key], self._streams.into
        # Allocated on the computing stream, whose earlier work may still read the memory's last owner.
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        into.wait_stream(torch.cuda.current_stream(self.device))
        into.wait_event(kept.written)
        with torch.cuda.stream(into):
            tensor.copy_(kept.view(), non_blocking=True)
            kept.read, arrived = self._streams.came()
        self._coming[key] = (tensor, arrived)

    def read(self, key: Hashable) -> torch.Tensor:
        if self._streams is None:
            kept = self._kept[key]
            return kept.view().to(self.device, copy=True)
        self.fetch(key)
        tensor, arrived = self._coming.pop(key)
        torch.cuda.current_stream(self.device).wait_event(arrived)
        return tensor

    def take(self, key: Hashable) -> torch.Tensor:
        tensor = self.read(key)
        self._give_back(self._kept.pop(key))
        return tensor

    def drop(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        self._coming.pop(key, None)
        if kept is not None:
            self._give_back(kept)

    def _give_back(self, kept: _Kept) -> None:
        if self._streams is not None:
            self._streams.free(kept.read)
        self._arena.give_back(kept.buffer)

    def clear(self) -> None:
        for kept in self._kept.values():
            self._give_back(kept)
        self._begin()

    def section(self) -> HostStore:
        """The slabs and the streams are shared."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._begin()
        return other

    def close(self) -> None:
        """Give the memory back to the system. The store cannot be used afterwards."""
        self.clear()
        if self._cuda:
            torch.cuda.synchronize(self.device)
        self._leaving.clear()
        self._arena.close()

    def __del__(self) -> None:
        # A forward whose backward never came must not take its buffers along: pinned memory is scarce.
        self.clear()


class DiskStore(HostStore):
    """Tensors move into memory-mapped files, on CUDA through pinned staging buffers and a thread.

    The files have no name from the moment they are opened: the system takes them back when the process ends, however
    it ends. Their space is reserved when they are made, so a full disk is met there and not in the middle of a step.

    Args:
        device: where tensors come from and go back to.
        folder: a folder on the disk to use.
    """

    def __init__(self, device: torch.device, folder: Path):
        super().__init__(device)
        self.folder = folder
        self._staging = Arena(super()._slab)
        self._thread = ThreadPoolExecutor(1, "longtune-disk") if self._cuda else None
        self._waiting: deque[tuple[Future[Any], torch.Tensor]] = deque()

    def _begin(self) -> None:
        super()._begin()
        self._arriving: dict[Hashable, Future[tuple[torch.Tensor, Any]]] = {}

    def _slab(self, size: int) -> torch.Tensor:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
            reason = f"no {size:,} bytes for boundaries ({error.strerror}; {free:,} free)"
            raise DoesNotFit(Problem(str(self.folder), reason, "free some, or set boundary_store: host")) from error

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        if self._thread is None:
            super().put(key, tensor)
            return
        size = tensor.numel() * tensor.element_size()
        kept = _Kept(self._arena.get(size), tensor.shape, tensor.dtype)
        self._kept[key] = kept
        staged = _Kept(self._stage(size), tensor.shape, tensor.dtype)
        left = self._copy_out(tensor, staged.view())

        def write() -> None:
            left.synchronize()
            kept.buffer.copy_(staged.buffer)

        self._waiting.append((self._thread.submit(write), staged.buffer))

    def _stage(self, size: int) -> torch.Tensor:
        """A staging buffer; at most a few are under way."""
        while self._waiting and (len(self._waiting) > 2 * RING or self._waiting[0][0].done()):
            done, buffer = self._waiting.popleft()
            done.result()
            self._staging.give_back(buffer)
        return self._staging.get(size)

    def fetch(self, key: Hashable) -> None:
        if self._thread is None or self._streams is None or key in self._arriving or key not in self._kept:
            return
        kept, stream = self._kept[key], self._streams.into
        staged = _Kept(self._stage(kept.buffer.numel()), kept.shape, kept.dtype)
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        ready = torch.cuda.current_stream(self.device).record_event()

        def bring() -> tuple[torch.Tensor, Any]:
            # The one thread works in order: what was put before is written by now.
            staged.buffer.copy_(kept.buffer)
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                tensor.copy_(staged.view(), non_blocking=True)
                arrived = stream.record_event()
            arrived.synchronize()
            return tensor, arrived

        coming = self._thread.submit(bring)
        self._arriving[key] = coming
        self._waiting.append((coming, staged.buffer))

    def read(self, key: Hashable) -> torch.Tensor:
        if self._thread is None:
            return super().read(key)
        self.fetch(key)
        tensor, arrived = self._arriving.pop(key).result()
        torch.cuda.current_stream(self.device).wait_event(arrived)
        return tensor

    def drop(self, key: Hashable) -> None:
        if key in self._arriving:
            self._arriving.pop(key).result()
        super().drop(key)

    def _settle(self) -> None:
        """Wait for the thread, whose work uses the buffers."""
        while self._waiting:
            done, buffer = self._waiting.popleft()
            done.exception()
            self._staging.give_back(buffer)

    def clear(self) -> None:
        self._settle()
        super().clear()

    def close(self) -> None:
        super().close()
        # The thread ends with the last section: one that is still walked needs it.
        self._staging.close()


def make_store(kind: str, device: torch.device, scratch: Path | None = None) -> Store:
    """The store that a plan names; `scratch` is a folder for the disk store (default: the system's)."""
    if kind == "disk":
        return DiskStore(device, scratch or Path(tempfile.gettempdir()))
    return HostStore(device) if kind == "host" else DeviceStore()
