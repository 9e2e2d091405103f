"""A worker with its TokenTable on a fake GPU, as the contract sees it; also as a process of its own.

Run with the epoch and, for `pinned`, the descriptor of the host memory. It says what it exports, publishes step 4,
says so and serves until it is told to end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ipc.device_table import DeviceArray, DeviceTable
from ipc.shared_memory import Shape
from ipc.token_table import TokenTable
from runtime.device.device_tokens import DeviceTokens
from tests.fake_cuda import FakeCuda

SHAPE = Shape(slots=6, ring=3, rows=4, width=2)
ROWS, SLOTS = np.array([0, 2], np.int32), np.array([5, 1], np.int32)
VOCAB = 100


def on_cpu(array: DeviceArray) -> NDArray[np.generic]:
    """A fake device's memory is this process's; numpy's interface is what CUDA's was made after."""
    return np.asarray(SimpleNamespace(__array_interface__=array.__cuda_array_interface__))


def tensor(values: NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(values).long()


class GpuWriter:
    """Each call is queued and committed. With `host` also waited for, since its reader reads memory as it is."""

    def __init__(self, cuda: FakeCuda, host: TokenTable | None = None) -> None:
        self.cuda, self.table = cuda, DeviceTable(cuda, SHAPE, host)
        self.stream = cuda.create_stream()
        arrays = {name: on_cpu(array) for name, array in self.table.arrays.items()}
        self.tokens = DeviceTokens.over(arrays, "cpu")

    @property
    def next(self) -> torch.Tensor:
        for event in self.table.events:
            self.cuda.synchronize(event)
        return self.tokens.next

    def poison(self, step: int, rows: NDArray[np.int32]) -> None:
        self.launch(step, lambda at: self.tokens.poison(at, tensor(rows[:0])))

    def gather(self, step: int, slots: NDArray[np.int32]) -> None:
        self.launch(step, lambda at: self.tokens.gather(at, tensor(slots), VOCAB))

    def publish(self, step: int, rows: NDArray[np.int32], slots: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        self.launch(step, lambda at: self.tokens.publish(at, tensor(rows), tensor(slots), torch.from_numpy(ids)))

    def launch(self, step: int, kernel: Callable[[torch.Tensor], object]) -> None:
        self.cuda.launch(self.stream, lambda: kernel(torch.tensor([step])))
        self.table.commit(step, self.stream)
        if self.table.host is not None:
            self.table.wait(step)

    def close(self) -> None:
        self.table.close()
        self.cuda.destroy_stream(self.stream)


def main(epoch: int, fd: int | None = None) -> None:
    cuda = FakeCuda()
    writer = GpuWriter(cuda, None if fd is None else TokenTable(SHAPE, fd))
    print(msgspec.msgpack.encode(writer.table.export(epoch)).hex(), flush=True)
    writer.poison(4, ROWS)
    writer.publish(4, ROWS, SLOTS, np.array([[7, 8], [9, 10]], np.int32))
    print("committed", flush=True)
    cuda.serve_until(sys.stdin)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
