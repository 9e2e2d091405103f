"""Page-locked memory through which a step's arrays go to the device, and its answers come back, without waiting.

One block for each step in flight: a block is written again only once the device has done all that its last step asked
for, which an event tells. Knows nothing of what is in the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.device.accelerator import Accelerator, Event

Tensor = torch.Tensor
ALIGN = 256  # bytes


class Staging:
    """A ring of `steps` blocks, which grow with what is asked of them. For the thread that launches."""

    def __init__(self, gpu: Accelerator, steps: int, nbytes: int) -> None:
        self.gpu, self.step = gpu, 0
        self.blocks = [[gpu.pinned(nbytes)] for _ in range(steps)]
        self.events: list[Event | None] = [None] * steps
        self.used = 0

    def begin(self) -> None:
        """Take the next block; wait for the device where it still uses it."""
        at = self.step % len(self.blocks)
        event, block = self.events[at], self.blocks[at]
        if event is not None:
            event.synchronize()
        if len(block) > 1:
            self.blocks[at] = [self.gpu.pinned(sum(len(part) for part in block))]
        self.used = 0

    def end(self) -> None:
        """The step's launches are all in the stream."""
        event = self.gpu.event()
        event.record()
        self.events[self.step % len(self.blocks)] = event
        self.step += 1

    def put(self, array: NDArray[Any], into: Tensor | None = None) -> Tensor:
        """A copy of `array` on the device: in `into`, which has its shape and type, or in a tensor of its own."""
        staged = self._room(array.nbytes).view(_dtype(array.dtype)).view(array.shape)
        np.copyto(staged.numpy(), array)
        if into is not None:
            return into.copy_(staged, non_blocking=True)
        return staged.to(self.gpu.device, non_blocking=True, copy=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host, there once the step is done and until the block is taken again."""
        room = self._room(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return room.copy_(tensor, non_blocking=True)

    def _room(self, nbytes: int) -> Tensor:
        block = self.blocks[self.step % len(self.blocks)]
        if self.used + nbytes > len(block[-1]):
            block.append(self.gpu.pinned(max(2 * len(block[-1]), nbytes)))
            self.used = 0
        room = block[-1][self.used : self.used + nbytes]
        self.used += -(-nbytes // ALIGN) * ALIGN
        return room


def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
