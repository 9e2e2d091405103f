"""Which KV pages each slot holds: how many a row needs, taking them, sharing the whole ones, letting go.

The pages of a slot are a row of `Slots.pages`; whose they are and whether they can be found again is the business of
`BlockPool` and `PrefixCache`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.block_pool import BlockPool
from runtime.limits import Limits
from runtime.prefix_cache import ROOT, PrefixCache
from runtime.slots import Slots

I32 = NDArray[np.int32]


@dataclass
class Growth:
    """Pages taken while a step is planned: whose, and which."""

    owners: list[I32] = field(default_factory=list)
    pages: list[I32] = field(default_factory=list)


class SlotPages:
    """The pages of `slots`, from one pool with one prefix cache."""

    def __init__(self, slots: Slots, limits: Limits) -> None:
        self.slots = slots
        self.block_size = limits.block_size
        self.cache = PrefixCache(BlockPool(limits.num_blocks), limits.block_size, limits.prefix_cache)

    def needed(self, slots: I32, lens: I32) -> I32:
        """How many further pages each slot needs to compute that many further tokens; int32 each."""
        tokens = self.slots.num_computed[slots] + lens
        pages: I32 = np.maximum(-(-tokens // self.block_size) - self.slots.num_pages[slots], 0)
        return pages

    def held(self, slot: int) -> I32:
        held: I32 = self.slots.pages[slot, : self.slots.num_pages[slot]]
        return held

    def grow(self, slots: I32, lens: I32, growth: Growth) -> None:
        """Take the pages that the rows need and let the prefix cache know of prompt pages that this step fills."""
        need = self.needed(slots, lens)
        field = self.slots
        owners = np.repeat(slots, need)
        pages = self.cache.take(len(owners))
        within = np.arange(len(owners)) - np.repeat(np.cumsum(need) - need, need)
        field.pages[owners, field.num_pages[owners] + within] = pages
        field.num_pages[slots] += need
        growth.owners.append(owners)
        growth.pages.append(pages)
        for row in np.flatnonzero(field.num_computed[slots] < field.num_prefill[slots]):
            slot = int(slots[row])
            filled = min(int(field.num_computed[slot] + lens[row]), int(field.num_prefill[slot]))
            self._cache_whole(slot, filled // self.block_size)

    def start(self, slot: int, length: int, growth: Growth) -> None:
        """`grow` for the first `length` tokens of one new slot; alone, since the next one may share its pages."""
        field = self.slots
        held, filled = int(field.num_pages[slot]), int(field.num_computed[slot]) + length
        pages = self.cache.take(-(-filled // self.block_size) - held)
        field.pages[slot, held : held + len(pages)] = pages
        field.num_pages[slot] = held + len(pages)
        growth.owners.append(np.full(len(pages), slot, np.int32))
        growth.pages.append(pages)
        self._cache_whole(slot, filled // self.block_size)

    def _cache_whole(self, slot: int, whole: int) -> None:
        """Insert the slot's first `whole` pages, so far as they are not there yet."""
        field, size = self.slots, self.block_size
        known = int(field.num_cached[slot])
        if known < 0 or whole <= known:
            return
        parent = int(field.pages[slot, known - 1]) if known else ROOT
        ids = field.tokens[slot, known * size : whole * size]
        taken = self.cache.insert(parent, field.pages[slot, known:whole], ids)
        field.num_cached[slot] = whole if taken == whole - known else -1

    def release(self, slot: int) -> None:
        """Let go of all the slot's pages, after the whole ones of known tokens have been made findable."""
        field = self.slots
        written = min(int(field.num_computed[slot]), int(field.committed[slot]) - 1)
        self._cache_whole(slot, written // self.block_size)
        self.cache.release(self.held(slot))
