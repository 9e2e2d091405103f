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


@dataclass(frozen=True)
class Shape:
    """What both sides of a TokenTable must agree on; `ring` is at least overlap depth + 2."""

    slots: int
    ring: int
    rows: int
    width: int = 1  # tokens a row may yield in one step

    @property
    def nbytes(self) -> int:
        return 4 * (self.slots + self.ring * self.rows * (self.width + 1)) + 8 * self.ring


def create_table(shape: Shape) -> int:
    """The descriptor of a TokenTable with no step stamped and no id written, every page touched; inheritable."""
    fd = _create("sidestep-tokens", shape.nbytes)
    ring, cells = shape.ring, shape.ring * shape.rows
    with mmap.mmap(fd, shape.nbytes) as memory:
        memory.write(NOTHING * (8 * ring) + bytes(4 * shape.slots) + NOTHING * (4 * cells * shape.width))
        memory.write(bytes(4 * cells))
    return fd


def create_masks(ring: int, rows: int) -> int:
    """The descriptor of a MaskRing large enough for any vocabulary; inheritable."""
    return _create("sidestep-masks", ring * rows * MOST_IDS // 8)


def _create(name: str, nbytes: int) -> int:
    fd = os.memfd_create(name, 0)
    os.set_inheritable(fd, True)
    os.truncate(fd, nbytes)
    return fd
