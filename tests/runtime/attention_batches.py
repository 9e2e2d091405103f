"""Batches for attention, from plans that `SlotTables` unfolds: rows of given lengths on pages in disorder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.batch import Batch, SlotTables
from runtime.sampling import Sampling
from runtime.step import ID_DTYPE, SLOT_DTYPE, SlotAdmission, StepPlan


class Slots:
    """Of `SlotTables`, with pages handed out in disorder; page 0 to nobody."""

    def __init__(self, num_slots: int, max_pages: int, page_size: int, seed: int = 0) -> None:
        self.tables = SlotTables(num_slots, max_pages, page_size)
        self.num_pages = num_slots * max_pages + 1
        self.free = (1 + np.random.default_rng(seed).permutation(self.num_pages - 1)).tolist()
        self.length = [0] * num_slots
        self.held = [0] * num_slots

    def step(
        self,
        decode: list[int],
        chunks: Sequence[tuple[int, int]] = (),
        admitted: Sequence[tuple[int, int]] = (),
    ) -> Batch:
        """`decode`: slots; `chunks`: (slot, tokens); `admitted`: (slot, tokens that it brings along)."""
        admissions = []
        for slot, start in admitted:
            self.length[slot] = self.held[slot] = 0
            pages = self._grow(slot, start)
            admissions.append(SlotAdmission(slot, start, start + 1, np.array(pages, ID_DTYPE).tobytes(), Sampling()))
        counts = [(slot, 1) for slot in decode] + list(chunks)
        grown = [(slot, page) for slot, count in counts for page in self._grow(slot, count)]
        plan = StepPlan(
            0,
            self.tables.next_step,
            np.array(decode, SLOT_DTYPE).tobytes(),
            np.array([slot for slot, _ in chunks], SLOT_DTYPE).tobytes(),
            np.array([count for _, count in chunks], ID_DTYPE).tobytes(),
            bytes([1] * len(chunks)),
            np.ones(sum(count for _, count in chunks), ID_DTYPE).tobytes(),
            np.array([slot for slot, _ in grown], SLOT_DTYPE).tobytes(),
            np.array([page for _, page in grown], ID_DTYPE).tobytes(),
            admissions,
        )
        return self.tables.apply(plan)

    def _grow(self, slot: int, count: int) -> list[int]:
        self.length[slot] += count
        more = -(-self.length[slot] // self.tables.block_size) - self.held[slot]
        self.held[slot] += more
        return [self.free.pop() for _ in range(more)]


def batch_of(rows: list[tuple[int, int]], num_decode: int, page_size: int) -> Batch:
    """One step of rows (tokens before, tokens now); of the first `num_decode` one token is computed in any case."""
    most = max((before + now for before, now in rows), default=1)
    slots = Slots(len(rows) + 1, -(-most // page_size), page_size)
    admitted = [(slot, before) for slot, (before, _) in enumerate(rows, 1)]
    chunks = [(slot, now) for slot, (_, now) in enumerate(rows, 1)][num_decode:]
    return slots.step(list(range(1, num_decode + 1)), chunks, admitted)
