"""The TokenTable: next-token ids that the worker writes and the scheduler reads, in memory both of them map.

`next[slot]` is the input id of a slot's next decode row. The ring `ids[step % R, row, k]` with `count[row]`, a step
stamp and an error word holds what each step drew. Knows no plan and no request. Sampled rows are poisoned with -1
before use; a reader that meets a poisoned or stale value raises. A device cannot: it sets the error word, and whoever
reads that step's ids raises. `ipc.device_table` is the table on a GPU.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from ipc.shared_memory import Shape

I32 = NDArray[np.int32]


class TableError(RuntimeError):
    """Our own broken invariant: an id was read that is not there (yet, or any more)."""


class TokenTable:
    """One mapping of the table. `fd` None keeps it in this process alone; otherwise it is of `create_table`."""

    stamp: NDArray[np.int64]  # [ring]
    error: I32  # [ring]: reads by a device, in that step, of ids that were not there
    count: I32  # [ring, rows]
    ids: I32  # [ring, rows, width]
    next: I32  # [slots]

    def __init__(self, shape: Shape, fd: int | None = None) -> None:
        self.shape = shape
        self._map = mmap.mmap(-1 if fd is None else fd, shape.nbytes)
        if fd is None:
            self._map.write(shape.blank())
        for name, field in shape.fields.items():
            setattr(self, name, np.ndarray(field.shape, field.dtype, self._map, field.offset, field.strides))

    @property
    def address(self) -> int:
        """Where the table begins in this process, on a page of its own."""
        return self.stamp.ctypes.data

    def poison(self, step: int, rows: I32) -> None:
        """Before a step runs: its sampling `rows` hold nothing yet, and the ring entry is now this step's."""
        entry = step % self.shape.ring
        self.ids[entry, rows] = -1
        self.count[entry] = 0  # of every row: one that does not sample in this step must not show an older step's ids
        self.error[entry] = 0
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
        """(int32[S, width], counts int32[S]) of a finished step. Raises `TableError` on a stale or poisoned entry.

        Also where the device read, for that step's input, ids that were not there.
        """
        entry = self._entry(step)
        if self.error[entry]:
            raise TableError(f"step {step} began with {self.error[entry]} ids that had not been written")
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
