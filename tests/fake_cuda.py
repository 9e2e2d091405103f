"""A CUDA runtime without a GPU, whose device does nothing until somebody waits for it.

Device memory is a memfd and a pointer its address here, so a kernel is any function on arrays over it. A handle names
a memfd of a living process, which another process opens below /proc. Copies and kernels queue up in their stream and
run when an event after them is waited for, by whichever process. So what is read without waiting is never there yet.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import ClassVar, TextIO

import numpy as np
from numpy.typing import NDArray

from ipc.cuda_runtime import HANDLE_BYTES, CudaError
from ipc.device_table import DeviceArray

RECORDED, DONE, WANTED = (
    0,
    1,
    2,
)  # an event's numbers: how often it was recorded, reached, and up to which it is waited for
DEVICE = "0000:65:00.0"
LOST_S = 30
HANDLE = struct.Struct("<8sQQQQ24s")


@dataclass
class Memory:
    """A memfd, mapped."""

    fd: int
    nbytes: int
    device: str

    def __post_init__(self) -> None:
        self.numbers: NDArray[np.int64] = np.frombuffer(mmap.mmap(self.fd, self.nbytes), np.int64)
        self.address = self.numbers.ctypes.data


@dataclass
class Queued:
    run: Callable[[], object]
    event: NDArray[np.int64] | None = None  # that stands for all up to here
    number: int = 0

    @property
    def wanted(self) -> bool:
        return self.event is not None and self.number <= self.event[WANTED]


class FakeCuda:
    """One process's runtime, of which a test may have several. `visible`: the devices by their ordinals."""

    place = "cpu"  # torch's name for the device
    living: ClassVar[weakref.WeakSet[FakeCuda]] = weakref.WeakSet()
    serial: ClassVar[count[int]] = count()

    def __init__(self, visible: tuple[str, ...] = (DEVICE,)) -> None:
        self.visible, self.device = visible, visible[0]
        self.name = (os.getpid(), next(self.serial))
        self.memory: dict[int, Memory] = {}
        self.events: dict[int, Memory] = {}
        self.shared_events: set[int] = set()
        self.host: dict[int, int] = {}
        self.streams: dict[int, deque[Queued]] = {0: deque()}
        self._running: set[int] = set()
        self.living.add(self)

    def current_device(self) -> str:
        return self.device

    def select_device(self, bus_id: str) -> None:
        if bus_id not in self.visible:
            raise CudaError("cudaDeviceGetByPCIBusId: invalid device ordinal")
        self.device = bus_id

    def malloc(self, nbytes: int) -> int:
        return self._keep(self.memory, self._new(nbytes))

    def free(self, memory: int) -> None:
        os.close(self.memory.pop(memory).fd)

    def register_host(self, address: int, nbytes: int) -> None:
        self.host[address] = nbytes

    def unregister_host(self, address: int) -> None:
        del self.host[address]

    def create_stream(self) -> int:
        stream = max(self.streams) + 1
        self.streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: int) -> None:
        del self.streams[stream]

    def create_event(self, interprocess: bool = False) -> int:
        event = self._keep(self.events, self._new(mmap.PAGESIZE))
        if interprocess:
            self.shared_events.add(event)
        return event

    def destroy_event(self, event: int) -> None:
        os.close(self.events.pop(event).fd)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Into memory of this device, or page-locked: any other would make the caller wait."""
        places = {**self.host, **{address: memory.nbytes for address, memory in self.memory.items()}}
        if not any(begin <= to and to + nbytes <= begin + size for begin, size in places.items()):
            raise CudaError("cudaMemcpyAsync: invalid argument")
        self.launch(stream, lambda: ctypes.memmove(to, source, nbytes))

    def launch(self, stream: int, kernel: Callable[[], object]) -> None:
        self.streams[stream].append(Queued(kernel))

    def record(self, event: int, stream: int) -> None:
        numbers = self.events[event].numbers
        numbers[RECORDED] += 1
        number = int(numbers[RECORDED])

        def reach() -> None:
            numbers[DONE] = number

        self.streams[stream].append(Queued(reach, numbers, number))

    def stream_wait(self, stream: int, event: int) -> None:
        numbers = self.events[event].numbers
        number = int(numbers[RECORDED])
        self.launch(stream, lambda: self._finish(numbers, number))

    def synchronize(self, event: int) -> None:
        numbers = self.events[event].numbers
        self._finish(numbers, int(numbers[RECORDED]))

    def export_memory(self, memory: int) -> bytes:
        return self._handle(b"memory", self.memory[memory])

    def open_memory(self, handle: bytes) -> int:
        opened = self._opened("cudaIpcOpenMemHandle", b"memory", handle)
        if opened.device != self.device:
            raise CudaError("cudaIpcOpenMemHandle: invalid argument")
        return self._keep(self.memory, opened)

    def close_memory(self, memory: int) -> None:
        self.free(memory)

    def export_event(self, event: int) -> bytes:
        if event not in self.shared_events:
            raise CudaError("cudaIpcGetEventHandle: invalid resource handle")
        return self._handle(b"event", self.events[event])

    def open_event(self, handle: bytes) -> int:
        return self._keep(self.events, self._opened("cudaIpcOpenEventHandle", b"event", handle))

    def array(self, array: DeviceArray) -> NDArray[np.generic]:
        """Over the same memory; numpy's interface is what CUDA's was made after."""
        return np.asarray(SimpleNamespace(__array_interface__=array.__cuda_array_interface__))

    def serve_until(self, said: TextIO) -> None:
        """Be the device for other processes until something is said, or nobody is left to say it."""
        while not select.select([said], [], [], 0)[0]:
            self.run_wanted()
            os.sched_yield()

    def run_wanted(self) -> None:
        """Each stream up to the last event that somebody waits for."""
        for stream, queue in list(self.streams.items()):
            if stream in self._running:
                continue  # it waits for another
            self._running.add(stream)
            while any(queued.wanted for queued in queue):
                queue.popleft().run()
            self._running.remove(stream)

    def _finish(self, event: NDArray[np.int64], number: int) -> None:
        event[WANTED] = max(int(event[WANTED]), number)
        lost = time.monotonic() + LOST_S
        while event[DONE] < number:
            for process in list(self.living):
                process.run_wanted()
            os.sched_yield()
            assert time.monotonic() < lost, "nobody does what was waited for"

    def _new(self, nbytes: int) -> Memory:
        fd = os.memfd_create("fake-cuda")
        os.truncate(fd, nbytes)
        return Memory(fd, nbytes, self.device)

    def _keep(self, among: dict[int, Memory], memory: Memory) -> int:
        among[memory.address] = memory
        return memory.address

    def _handle(self, kind: bytes, memory: Memory) -> bytes:
        return HANDLE.pack(kind, *self.name, memory.fd, memory.nbytes, memory.device.encode()).ljust(HANDLE_BYTES)

    def _opened(self, call: str, kind: bytes, handle: bytes) -> Memory:
        found, pid, serial, fd, nbytes, device = HANDLE.unpack_from(handle)
        if found.rstrip(b"\0") != kind or len(handle) != HANDLE_BYTES:
            raise CudaError(f"{call}: invalid resource handle")
        if (pid, serial) == self.name:
            raise CudaError(f"{call}: invalid device context")
        try:
            return Memory(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), nbytes, device.rstrip(b"\0").decode())
        except FileNotFoundError:
            raise CudaError(f"{call}: invalid argument") from None


class PromptCuda(FakeCuda):
    """Its device does everything at once, so that nobody has to serve."""

    def launch(self, stream: int, kernel: Callable[[], object]) -> None:
        kernel()

    def record(self, event: int, stream: int) -> None:
        numbers = self.events[event].numbers
        numbers[RECORDED] += 1
        numbers[DONE] = numbers[RECORDED]
