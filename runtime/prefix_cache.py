"""The radix cache: KV pages that outlive their request, found again by the tokens they hold. Knows no request.

A tree with one page per node. A node is found by (parent page, the bytes of the page's token ids), so the page number
is the node and its fields are arrays. Whoever holds a page holds its whole path, therefore an unheld page has only
unheld pages below it and eviction may take any unheld leaf, the least recently used first.

A page may be inserted as soon as the step that fills it has been sent: steps run in order, so every later step finds
it filled. That is how a burst with one prefix computes it once.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from runtime.block_pool import BlockPool

I32 = NDArray[np.int32]
ROOT = 0


class PrefixCache:
    """Cached pages of `pool`. With `enabled` false it keeps nothing and every page goes straight back."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.num_unheld = 0  # cached pages nobody holds: what `evict` can give
        self._pages: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._children = np.zeros(pool.num_blocks, np.int32)
        self._used = np.zeros(pool.num_blocks, np.int64)
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []  # (last use, page) of unheld leaves; stale entries are skipped

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones and cached ones that nobody holds."""
        return self.pool.num_free + self.num_unheld

    def match(self, ids: I32) -> I32:
        """The pages of the longest cached prefix, whole pages of at most len(ids) - 1 tokens; they are now held."""
        found: list[int] = []
        parent = ROOT
        raw, size = ids.tobytes(), self.block_size * ids.itemsize
        for start in range(0, len(raw) - size, size):
            page = self._pages.get((parent, raw[start : start + size]))
            if page is None:
                break
            found.append(page)
            parent = page
        pages = np.array(found, np.int32)
        if not found:
            return pages
        self.num_unheld -= int((self.pool.refs[pages] == 0).sum())
        self.pool.hold(pages)
        return pages

    def insert(self, parent: int, pages: I32, ids: I32) -> int:
        """Make held pages findable below `parent` (ROOT or a cached page); ids fill them wholly.

        Returns how many were taken: it stops where another page already holds the same tokens.
        """
        if not self.enabled:
            return 0
        raw, size = ids.tobytes(), self.block_size * ids.itemsize
        for taken, page in enumerate(pages.tolist()):
            key = (parent, raw[taken * size : (taken + 1) * size])
            if self._pages.setdefault(key, page) != page:
                return taken
            self._keys[page] = key
            self._children[parent] += 1
            parent = page
        return len(pages)

    def release(self, pages: I32) -> None:
        """The holder lets go of a path of pages: cached ones stay until evicted, the others are free at once."""
        unheld = self.pool.drop(pages)
        self._clock += 1
        private = []
        for page in unheld.tolist():
            if page not in self._keys:
                private.append(page)
                continue
            self.num_unheld += 1
            self._used[page] = self._clock
            if not self._children[page]:
                heapq.heappush(self._leaves, (self._clock, page))
        self.pool.free(np.array(private, np.int32))

    def take(self, count: int) -> I32:
        """`count` pages held once by the caller, evicting if need be. Raises `RuntimeError` beyond `num_available`."""
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free)
        return self.pool.take(count)

    def evict(self, count: int) -> int:
        """Free up to `count` unheld cached pages, least recently used leaves first; returns how many."""
        freed: list[int] = []
        while len(freed) < count and self._leaves:
            used, page = heapq.heappop(self._leaves)
            if page not in self._keys or self.pool.refs[page] or self._children[page] or self._used[page] != used:
                continue
            freed.append(page)
            self._forget(page)
        self.pool.free(np.array(freed, np.int32))
        self.num_unheld -= len(freed)
        return len(freed)

    def _forget(self, page: int) -> None:
        parent, _ = key = self._keys.pop(page)
        del self._pages[key]
        self._used[page] = -1
        self._children[parent] -= 1
        if parent != ROOT and not self._children[parent] and not self.pool.refs[parent]:
            heapq.heappush(self._leaves, (int(self._used[parent]), parent))
