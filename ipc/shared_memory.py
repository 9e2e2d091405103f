"""The memory that processes share, as whoever starts them makes it: anonymous files that are inherited.

They have no name to collide, to unlink or to leave behind. `ipc.token_table` and `ipc.mask_ring` say what stands in
them. Knows no numpy: who only makes them need not wait for it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

MOST_IDS = 1 << 19  # of a vocabulary that masks have room for
NOTHING = b"\xff"  # every byte of -1
HEADER = 16  # bytes of an entry before its counts
ALIGN = 16  # bytes; entries begin where a device writes widely


@dataclass(frozen=True)
class Field:
    """One array of a table; `offset` and `strides` in bytes."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """What both sides of a TokenTable must agree on; `ring` is at least overlap depth + 2.

    What a step drew stands in one piece, its entry, so that one copy brings it from a device.
    """

    slots: int
    ring: int
    rows: int
    width: int = 1  # tokens a row may yield in one step

    @property
    def entry_nbytes(self) -> int:
        return -(-(HEADER + 4 * self.rows * (1 + self.width)) // ALIGN) * ALIGN

    @property
    def nbytes(self) -> int:
        return self.ring * self.entry_nbytes + 4 * self.slots

    @property
    def fields(self) -> dict[str, Field]:
        """The entries one after the other, each with a stamp, an error word, counts and ids; then `next`."""
        ring, rows, width, entry = self.ring, self.rows, self.width, self.entry_nbytes
        return {
            "stamp": Field(0, "<i8", (ring,), (entry,)),
            "error": Field(8, "<i4", (ring,), (entry,)),
            "count": Field(HEADER, "<i4", (ring, rows), (entry, 4)),
            "ids": Field(HEADER + 4 * rows, "<i4", (ring, rows, width), (entry, 4 * width, 4)),
            "next": Field(ring * entry, "<i4", (self.slots,), (4,)),
        }

    def blank(self) -> bytes:
        """A table with no step stamped and no id written."""
        entry = NOTHING * 8 + bytes(HEADER - 8 + 4 * self.rows) + NOTHING * (4 * self.rows * self.width)
        return entry.ljust(self.entry_nbytes, b"\0") * self.ring + bytes(4 * self.slots)


def create_table(shape: Shape) -> int:
    """The descriptor of a blank TokenTable, every page touched; inheritable."""
    fd = _create("sidestep-tokens", shape.nbytes)
    with mmap.mmap(fd, shape.nbytes) as memory:
        memory.write(shape.blank())
    return fd


def create_masks(ring: int, rows: int) -> int:
    """The descriptor of a MaskRing large enough for any vocabulary; inheritable."""
    return _create("sidestep-masks", ring * rows * MOST_IDS // 8)


def _create(name: str, nbytes: int) -> int:
    fd = os.memfd_create(name, 0)
    os.set_inheritable(fd, True)
    os.truncate(fd, nbytes)
    return fd
