"""The scheduler's memory of its live requests: one numpy array per field, indexed by slot.

Arrays, not objects, because a decode step touches every live request: with arrays it is planned and committed by a
few vector operations, whatever their number. A Python object per request is touched at admission and at the end only.
Slot 0 is scratch for padding and is never given to a request.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from runtime.request import Request

STOP_IDS = 4  # of a request that stand in its row


class SlotState(IntEnum):
    """FREE → RUNNING → (PREEMPTING →) ENDED → FREE; a preempted slot that has not ended is requeued and FREE."""

    FREE = 0
    RUNNING = 1
    PREEMPTING = 2  # marked: its results still count, no new row is planned
    ENDED = 3  # marked: results are dropped


class Slots:
    """Fields of `num_slots` slots; rows of token ids and pages are wide enough for `max_model_len`."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.state = np.zeros(num_slots, np.int8)
        self.num_tokens = np.zeros(num_slots, np.int32)  # known or in flight
        self.num_computed = np.zeros(num_slots, np.int32)  # KV planned so far
        self.committed = np.zeros(num_slots, np.int32)  # known
        self.num_prefill = np.zeros(num_slots, np.int32)  # ids carried at admission; those after are in `next`
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)  # tokens at which the request ends by length
        self.min_stop = np.zeros(num_slots, np.int32)  # a stop id counts from this many tokens on
        self.num_pages = np.zeros(num_slots, np.int32)
        self.num_cached = np.zeros(num_slots, np.int32)  # leading pages known to the prefix cache; -1: gave up
        self.last_step = np.full(num_slots, -1, np.int64)  # the last step that names the slot
        self.priority = np.zeros(num_slots, np.int64)
        self.arrival = np.zeros(num_slots, np.int64)
        self.request = np.zeros(num_slots, np.uint64)
        self.source = np.zeros(num_slots, np.uint16)
        self.constrained = np.zeros(num_slots, bool)  # draws under masks
        self.stop_ids = np.full((num_slots, STOP_IDS), -1, np.int32)
        self.more_stop_ids: dict[int, NDArray[np.int32]] = {}  # all of those slots that have more
        self.tokens = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.pages = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self.free = list(range(num_slots - 1, 0, -1))

    def assign(self, request: Request, limit: int) -> int:
        """Give a free slot to a request that has been queued and set every field; returns the slot."""
        assert request.arrival is not None
        slot = self.free.pop()
        ids = np.concatenate((request.prompt_ids, request.output_ids))
        self.state[slot] = SlotState.RUNNING
        self.num_tokens[slot] = self.committed[slot] = self.num_prefill[slot] = len(ids)
        self.num_computed[slot] = self.num_pages[slot] = self.num_cached[slot] = 0
        self.num_prompt[slot] = len(request.prompt_ids)
        self.limit[slot] = limit
        least = 0 if request.sampling.constrained else request.sampling.min_tokens  # a grammar's end is the answer's
        self.min_stop[slot] = len(request.prompt_ids) + least
        self.last_step[slot] = -1
        self.priority[slot] = request.priority
        self.arrival[slot] = request.arrival
        self.request[slot] = request.id
        self.source[slot] = request.source
        self.constrained[slot] = request.sampling.constrained
        self.tokens[slot, : len(ids)] = ids
        self._set_stop_ids(slot, request.sampling.stop_ids)
        return slot

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """One request with thousands must not widen the rows that every step compares."""
        self.stop_ids[slot] = -1
        if len(stop_ids) > STOP_IDS:
            self.more_stop_ids[slot] = np.array(stop_ids, np.int32)
        else:
            self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def release(self, slot: int) -> None:
        self.more_stop_ids.pop(slot, None)
        self.state[slot] = SlotState.FREE
        self.free.append(slot)

    def stopped(self, slots: NDArray[np.int32], ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether the id is one of its slot's stop ids, bool[len(slots)]."""
        stopped: NDArray[np.bool_] = (self.stop_ids[slots] == ids[:, None]).any(1)
        for slot, more in self.more_stop_ids.items():
            stopped |= (slots == slot) & np.isin(ids, more)
        return stopped
