"""An accelerator on the CPU: its stream runs at once, but the host is told so only when it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.device_table import DeviceArray


class FakeEvent:
    """Done once the host has waited for it, or for a later one."""

    def __init__(self, gpu: FakeAccelerator) -> None:
        self.gpu, self.number, self.at = gpu, 0, 0

    @property
    def done(self) -> bool:
        return 0 < self.number <= self.gpu.reached

    def record(self) -> None:
        self.gpu.recorded_events += 1
        self.number, self.at = self.gpu.recorded_events, time.monotonic_ns()

    def synchronize(self) -> None:
        assert self.number, "waited for, but never recorded"
        if not self.done:
            self.gpu.waits += 1
            self.gpu.reached = max(self.gpu.reached, self.number)

    def elapsed_ms(self, later: Any) -> float:
        assert self.done and later.done, "the times of what has not happened"
        return float(torch.tensor((later.at - self.at) / 1e6, dtype=torch.float32))


class FakeAccelerator:
    """`runtime.device.accelerator.Accelerator`."""

    device, capability = torch.device("cpu"), (9, 0)
    stream = 0

    def __init__(self) -> None:
        self.waits = self.pinned_bytes = 0
        self.recorded_events = self.reached = 0  # events by number, in the stream's order

    def launching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def enter_thread(self) -> None: ...

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        work()
        return work

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 0

    def tensor(self, array: DeviceArray | NDArray[Any]) -> torch.Tensor:
        """numpy's interface is what CUDA's was made after."""
        if isinstance(array, np.ndarray):
            return torch.from_numpy(array)
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=array.__cuda_array_interface__)))

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def close(self) -> None: ...
