"""The ledger of KV pages: who holds each page, and which are free. Knows neither tokens nor requests.

One reference count per page in one array, and a stack of free pages, so that taking, holding and dropping pages are
array operations. Page 0 is scratch for padding and is never handed out. A page whose count falls to zero is not free
by itself: the prefix cache may want to keep it, so `drop` names such pages and the caller decides.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class BlockPool:
    """`num_blocks` pages, the scratch page included."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self.refs[0] = 1
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._top = num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._top

    def take(self, count: int) -> I32:
        """`count` free pages, each now held once. Raises `RuntimeError` when there are too few."""
        if count > self._top:
            raise RuntimeError(f"{count} pages wanted, {self._top} free")
        self._top -= count
        pages = self._free[self._top : self._top + count][::-1].copy()
        self.refs[pages] = 1
        return pages

    def hold(self, pages: I32) -> None:
        """One more holder for each of the (distinct) pages."""
        self.refs[pages] += 1

    def drop(self, pages: I32) -> I32:
        """One holder less for each of the (distinct) pages; returns those that nobody holds now."""
        if (self.refs[pages] <= 0).any():
            raise RuntimeError("a page was dropped by someone who did not hold it")
        self.refs[pages] -= 1
        unheld: I32 = pages[self.refs[pages] == 0]
        return unheld

    def free(self, pages: I32) -> None:
        """Put pages that nobody holds back on the stack."""
        self._free[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
