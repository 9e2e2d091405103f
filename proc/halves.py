"""The worker's end of the masks: second halves of plans as they come, with what stands for them in the ring."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ipc.endpoints import address
from ipc.mask_ring import MaskRing
from ipc.sockets import Receiver
from proc.role import Control, ProcessSpec
from proc.shapes import ring_shape
from runtime.device.base import MaskSet
from runtime.step import ID_DTYPE, SampleHalf

LONGEST = 60.0  # seconds that a step waits for its masks
SLICE = 0.1  # seconds between looks whether the worker ends


class Stopped(Exception):
    """The worker is to end; the masks do not matter any more."""


class Halves:
    """`runtime.device.base.Masks` over a socket; used by the one thread that samples."""

    def __init__(self, spec: ProcessSpec, replica: int, index: int) -> None:
        """Those of a replica's worker; `index` counts over all replicas."""
        self.spec, self.replica, self.closed = spec, replica, False
        self.control: Control | None = None
        self.given_up: Callable[[], bool] = lambda: False  # whoever waits would wait in vain
        self.inbox: Receiver[SampleHalf] = Receiver(address(spec.run_dir, "worker", index, "halves"), SampleHalf)
        self.ring: MaskRing

    def open(self, vocab_size: int) -> Halves:
        """Map the ring. Raises `ValueError` for a vocabulary that is too large for it."""
        self.ring = MaskRing(*ring_shape(self.spec.settings), vocab_size, self.spec.rings[self.replica])
        return self

    def wait(self, step: int) -> MaskSet:
        """Of the step, those that come first. Raises `TimeoutError`, and `Stopped` where the role is told to stop."""
        deadline = time.monotonic() + LONGEST
        while (half := self.inbox.receive(SLICE)) is None or half.step < step:  # what came second is dropped here
            if self.closed or self.given_up() or (self.control is not None and self.control.stopped.is_set()):
                raise Stopped
            if time.monotonic() > deadline:
                raise TimeoutError(f"the grammar process has not sent the masks of step {step}")
        if half.step != step:
            raise RuntimeError(f"masks of step {half.step} came, those of step {step} were due")
        rows = np.frombuffer(half.rows, ID_DTYPE).astype(np.int64)
        return MaskSet(rows, self.ring.entry(step)[: len(rows)], half.ordered, half.written, time.monotonic_ns())

    def close(self) -> None:
        """Whoever waits is let go."""
        self.closed = True
