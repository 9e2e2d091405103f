"""A worker with its TokenTable on a GPU, fake or real, as the contract sees it; also as a process of its own.

Run with the runtime's name, the epoch and, for `pinned`, the descriptor of the host memory. It says what it exports,
publishes step 4, says so and serves until it is told to end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ipc.cuda_runtime import Cudart
from ipc.device_table import DeviceArray, DeviceTable
from ipc.shared_memory import Shape
from ipc.token_table import TokenTable
from runtime.device.device_tokens import DeviceTokens
from tests.fake_cuda import FakeCuda

SHAPE = Shape(slots=6, ring=3, rows=4, width=2)
ROWS, SLOTS = np.array([0, 2], np.int32), np.array([5, 1], np.int32)
VOCAB = 100


class RealCuda(Cudart):
    """A GPU of this machine, with what the fake one has beside the protocol."""

    place = "cuda"

    def launch(self, stream: int, kernel: Callable[[], object]) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            kernel()

    def array(self, array: DeviceArray) -> DeviceArray:
        return array

    def serve_until(self, said: TextIO) -> None:
        said.readline()


class GpuWriter:
    """Each call is queued and committed. With `host` also waited for, since its reader reads memory as it is."""

    def __init__(self, cuda: FakeCuda | RealCuda, host: TokenTable | None = None) -> None:
        self.cuda, self.table = cuda, DeviceTable(cuda, SHAPE, host)
        self.stream = cuda.create_stream()
        arrays = {name: cuda.array(array) for name, array in self.table.arrays.items()}
        self.tokens = DeviceTokens.over(arrays, lambda array: torch.as_tensor(array, device=cuda.place))

    @property
    def next(self) -> torch.Tensor:
        for step in range(SHAPE.ring):
            self.table.wait(step)
        return self.tokens.next

    def poison(self, step: int, rows: NDArray[np.int32]) -> None:
        self.launch(step, lambda at: self.tokens.poison(at, self.index(rows[:0])))

    def gather(self, step: int, slots: NDArray[np.int32]) -> None:
        self.launch(step, lambda at: self.tokens.gather(at, self.index(slots), VOCAB))

    def publish(self, step: int, rows: NDArray[np.int32], slots: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        drawn = torch.from_numpy(ids)
        self.launch(
            step,
            lambda at: self.tokens.publish(at, self.index(rows), self.index(slots), drawn.to(self.cuda.place)),
        )

    def index(self, values: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(values).long().to(self.cuda.place)

    def launch(self, step: int, kernel: Callable[[torch.Tensor], object]) -> None:
        self.cuda.launch(self.stream, lambda: kernel(torch.tensor([step], device=self.cuda.place)))
        self.table.commit(step, self.stream)
        if self.table.host is not None:
            self.table.wait(step)

    def close(self) -> None:
        self.table.close()
        self.cuda.destroy_stream(self.stream)


def main(runtime: str, epoch: int, fd: int | None = None) -> None:
    cuda = {"FakeCuda": FakeCuda, "RealCuda": RealCuda}[runtime]()
    writer = GpuWriter(cuda, None if fd is None else TokenTable(SHAPE, fd))
    print(msgspec.msgpack.encode(writer.table.export(epoch)).hex(), flush=True)
    writer.poison(4, ROWS)
    writer.publish(4, ROWS, SLOTS, np.array([[7, 8], [9, 10]], np.int32))
    print("committed", flush=True)
    cuda.serve_until(sys.stdin)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
