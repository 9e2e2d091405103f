"""The TokenTable: next-token ids that the worker writes and the scheduler reads, in memory both of them map.

`next[slot]` is the input id of a slot's next decode row. The ring `ids[step % R, row, k]` with `count[row]` and a step
stamp holds what each step drew. The memory is a memfd made by whoever starts the processes and inherited by them, so
there is no name to collide, to unlink or to leave behind. Knows no plan and no request. Sampled rows are poisoned
with -1 before use; a reader that meets a poisoned or stale value raises.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class TableError(RuntimeError):
    """Our own broken invariant: an id was read that is not there (yet, or any more)."""


@dataclass(frozen=True)
class Shape:
    """What both sides must agree on; `ring` is at least overlap depth + 2."""

    slots: int
    ring: int
    rows: int
    width: int = 1  # tokens a row may yield in one step

    @property
    def nbytes(self) -> int:
        return 4 * (self.slots + self.ring * self.rows * (self.width + 1)) + 8 * self.ring


class TokenTable:
    """One mapping of the table. `fd` None keeps it in this process alone; otherwise it is a memfd of `create_fd`."""

    def __init__(self, shape: Shape, fd: int | None = None) -> None:
        self.shape = shape
        self._map = mmap.mmap(-1 if fd is None else fd, shape.nbytes)
        ring, rows, width = shape.ring, shape.rows, shape.width
        numbers = np.frombuffer(self._map, np.int32, offset=8 * ring)
        self.stamp = np.frombuffer(self._map, np.int64, ring)
        self.next: I32 = numbers[: shape.slots]
        self.ids: I32 = numbers[shape.slots :][: ring * rows * width].reshape(ring, rows, width)
        self.count: I32 = numbers[shape.slots + ring * rows * width :].reshape(ring, rows)

    @staticmethod
    def create_fd(shape: Shape) -> int:
        """A zeroed memfd of the table's size with no step stamped, every page touched; inheritable."""
        fd = os.memfd_create("sidestep-tokens", 0)
        os.set_inheritable(fd, True)
        os.truncate(fd, shape.nbytes)
        table = TokenTable(shape, fd)
        table.stamp[:] = -1
        table.ids[:] = -1
        table.next[:] = 0
        return fd

    def poison(self, step: int, rows: I32) -> None:
        """Before a step runs: its sampling `rows` hold nothing yet, and the ring entry is now this step's."""
        entry = step % self.shape.ring
        self.ids[entry, rows] = -1
        self.count[entry] = 0  # of every row: one that does not sample in this step must not show an older step's ids
        self.stamp[entry] = step

    def publish(self, step: int, rows: I32, slots: I32, ids: I32) -> None:
        """Write `ids`, int32[S, k] with k <= width, for `rows`, and the last of each row to `next[slots]`.

        Slot 0 is padding's: `next[0]` stays 0. Raises `TableError` for a step whose ring entry was not poisoned for it.
        """
        entry = self._entry(step)
        self.ids[entry, rows, : ids.shape[1]] = ids
        self.count[entry, rows] = ids.shape[1]
        self.next[slots] = np.where(slots == 0, 0, ids[:, -1])

    def read(self, step: int, rows: I32) -> tuple[I32, I32]:
        """(int32[S, width], counts int32[S]) of a finished step. Raises `TableError` on a stale or poisoned entry."""
        entry = self._entry(step)
        ids: I32 = self.ids[entry, rows]
        counts: I32 = self.count[entry, rows]
        missing = (ids < 0) & (np.arange(self.shape.width) < counts[:, None])
        if (counts < 1).any() or missing.any():
            raise TableError(f"ids of step {step} were read before they were written")
        return ids, counts

    def _entry(self, step: int) -> int:
        entry = step % self.shape.ring
        if self.stamp[entry] != step:
            raise TableError(f"ids of step {step} wanted, the ring holds step {self.stamp[entry]}")
        return entry
