"""What a device of its own clock and memory offers the host: a stream, events, page-locked memory, recorded work.

`Accelerator` is all that `runtime.device.cuda` asks of torch.cuda, so that everything else runs without a GPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
WARM_UPS = 2  # runs before work is recorded: kernels are built, workspaces made


class Event(Protocol):
    """A point in the stream."""

    def record(self) -> None:
        """It stands for all that is in the stream now."""

    def synchronize(self) -> None:
        """Sleep until all of that is done."""

    def elapsed_ms(self, later: Any) -> float:
        """Between two that are done, by the device's clock."""


class Accelerator(Protocol):
    """One thread launches; any may wait for events."""

    device: torch.device
    capability: tuple[int, int]  # of CUDA: which kernels run
    stream: int  # as the CUDA runtime names it

    def launching(self) -> AbstractContextManager[object]:
        """What the calling thread launches inside goes to the stream, in order."""

    def enter_thread(self) -> None:
        """Called once by each further thread that waits for events."""

    def event(self) -> Event: ...

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked uint8[nbytes] on the host: copies from and to it do not wait."""

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does `work` again, on the same memory, in one launch. Runs it some times; called at the start only."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """What `work` takes at most beyond what is held now. Called at the start only."""

    def tensor(self, array: Any) -> Tensor:
        """Over the device's memory that `array` describes, as `__cuda_array_interface__` says."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""

    def close(self) -> None:
        """Wait until the device has done all."""


class CudaEvent:
    """`Event` of torch.cuda, timed."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(self._stream)

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_ms(self, later: Any) -> float:
        elapsed: float = self._event.elapsed_time(later._event)
        return elapsed


class CudaAccelerator:
    """`Accelerator`: the GPU `index` and one stream of it."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self.capability = torch.cuda.get_device_capability(self.device)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.stream: int = self._stream.cuda_stream

    def launching(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def event(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        with self.launching():
            for _ in range(WARM_UPS):
                work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with self.launching():
            work()
        self._stream.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        return peak - before

    def tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array, device=self.device)

    def memory(self) -> tuple[int, int]:
        torch.cuda.empty_cache()  # what torch keeps for itself is free
        return torch.cuda.mem_get_info(self.device)

    def close(self) -> None:
        self._stream.synchronize()
