"""The ring of masks: which ids the constrained rows of a step may draw, one bit an id, in memory that both sides map.

Whoever makes masks writes those of step N into entry N % ring; the worker reads them when the step's second half says
that they are there. The memory is of `ipc.shared_memory`, in the size of the largest vocabulary; what is not touched
takes none.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from ipc.shared_memory import MOST_IDS


class MaskRing:
    """`ring` steps of `rows` masks; `fd` None keeps it in this process.

    Raises `ValueError` for a vocabulary that is too large.
    """

    def __init__(self, ring: int, rows: int, vocab_size: int, fd: int | None = None) -> None:
        if vocab_size > MOST_IDS:
            raise ValueError(f"a vocabulary of {vocab_size} ids; masks have room for {MOST_IDS}")
        words = -(-vocab_size // 32)
        self._map = mmap.mmap(-1 if fd is None else fd, ring * rows * words * 4)
        self.bits: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32).reshape(ring, rows, words)

    def entry(self, step: int) -> NDArray[np.uint32]:
        """uint32[rows, words] of a step."""
        entry: NDArray[np.uint32] = self.bits[step % len(self.bits)]
        return entry
