"""Steps in flight: what each was planned with, the masks it waits for, and the tokens that its result brings.

Knows no queue and no pages, and ends nothing: whoever commits a step reads in its `Outputs` which requests are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.request import Finish
from runtime.slots import Slots, SlotState
from runtime.step import ID_DTYPE, Logprobs, MaskOrder, SampleHalf, SlotAdmission

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class StepRecord:
    """What a step in flight will be read against."""

    step: int
    rows: I32  # rows that sample
    slots: I32  # the slot of each
    constrained: I32  # which of them draw under masks
    started: list[tuple[int, int, int]]  # (request, source, cached tokens) admitted by this step


@dataclass(frozen=True)
class Outputs:
    """The tokens of one step, a row per request."""

    step: int
    requests: NDArray[np.uint64]
    sources: NDArray[np.uint16]
    offsets: I32  # index of the token among the request's output
    ids: I32
    finishes: NDArray[np.uint8]  # `Finish`
    logprobs: list[tuple[int, int, int, Logprobs]]  # (request, source, index of the first token, what is told)
    started: list[tuple[int, int, int]]  # (request, source, cached tokens) of those whose first row this was

    @property
    def ended(self) -> list[int]:
        """Requests of which this is the last token."""
        ended: list[int] = self.requests[self.finishes != Finish.NONE].tolist()
        return ended


class StepsInFlight:
    """Of one worker's life, `epoch`; reads the fields of `slots` and writes what becomes known."""

    def __init__(self, slots: Slots, epoch: int) -> None:
        self.slots, self.epoch = slots, epoch
        self.records: deque[StepRecord] = deque()  # the oldest first
        self.acknowledged = -1  # the last step whose result has come
        self.num_committed = 0  # tokens
        self.num_overshoot = 0  # rows computed for requests that had ended
        self._masks_ordered = -1  # the last step whose masks have been ordered
        self._masks_spared = -1  # the last that was told to have none

    def __len__(self) -> int:
        return len(self.records)

    def add(self, step: int, sampling: NDArray[np.bool_], slots: I32, admissions: list[SlotAdmission]) -> bool:
        """A step has been planned, `sampling` and `slots` by row. Whether any row draws under a mask."""
        rows = np.flatnonzero(sampling).astype(np.int32)
        constrained = np.flatnonzero(self.slots.constrained[slots[rows]]).astype(np.int32)
        started = [self._started(admission) for admission in admissions]
        self.records.append(StepRecord(step, rows, slots[rows], constrained, started))
        return bool(len(constrained))

    def _started(self, admission: SlotAdmission) -> tuple[int, int, int]:
        slot = admission.slot
        return int(self.slots.request[slot]), int(self.slots.source[slot]), admission.start

    def order_masks(self, now: int) -> MaskOrder | SampleHalf | None:
        """For the oldest step, once: what its masks depend on is known now. `now` in nanoseconds.

        None where no row of it needs one. Rows whose request has ended get none. Once all have, also while their masks
        are made, the step's second half is there: without any, so that nobody waits for who makes masks.
        """
        if not self.records or not len(self.records[0].constrained):
            return None
        record, field = self.records[0], self.slots
        if record.step <= self._masks_spared:
            return None
        live = self._live(record.slots[record.constrained])
        if not live.any():
            self._masks_spared = record.step
            return SampleHalf(self.epoch, record.step, b"", now, now)
        if record.step <= self._masks_ordered:
            return None
        self._masks_ordered = record.step
        rows = record.constrained[live]
        slots = record.slots[rows]
        offsets = field.committed[slots] - field.num_prompt[slots] - 1
        return MaskOrder(
            self.epoch,
            record.step,
            rows.astype(ID_DTYPE).tobytes(),
            field.request[slots].astype("<u8").tobytes(),
            offsets.astype(ID_DTYPE).tobytes(),
            field.tokens[slots, field.committed[slots] - 1].astype(ID_DTYPE).tobytes(),
            now,
        )

    def commit(self, step: int, ids: I32, logprobs: Sequence[Logprobs] = ()) -> Outputs:
        """Take the ids of the oldest step, int32[S] as its `rows` name them.

        Rows whose request has ended are dropped. Raises `RuntimeError` when the results come out of order.
        """
        record = self.records.popleft()
        if record.step != step or len(ids) != len(record.rows):
            raise RuntimeError(f"result of step {step} with {len(ids)} ids, expected step {record.step}")
        self.acknowledged = step
        field = self.slots
        live = self._live(record.slots)
        told = [self._told(one) for one in logprobs if self._live(np.array([one.slot]))[0]]
        slots, ids = record.slots[live], ids[live]
        self.num_overshoot += len(record.slots) - len(slots)
        self.num_committed += len(slots)
        offsets = field.committed[slots] - field.num_prompt[slots]
        field.tokens[slots, field.committed[slots]] = ids
        field.committed[slots] += 1
        finishes = self._finishes(slots, ids)
        return Outputs(step, field.request[slots], field.source[slots], offsets, ids, finishes, told, record.started)

    def _live(self, slots: I32) -> NDArray[np.bool_]:
        state = self.slots.state[slots]
        live: NDArray[np.bool_] = (state == SlotState.RUNNING) | (state == SlotState.PREEMPTING)
        return live

    def _told(self, one: Logprobs) -> tuple[int, int, int, Logprobs]:
        field, slot = self.slots, one.slot
        return int(field.request[slot]), int(field.source[slot]), one.first - int(field.num_prompt[slot]), one

    def _finishes(self, slots: I32, ids: I32) -> NDArray[np.uint8]:
        field = self.slots
        stop = field.stopped(slots, ids) & (field.committed[slots] > field.min_stop[slots])
        length = field.committed[slots] >= field.limit[slots]
        return np.where(stop, Finish.STOP, np.where(length, Finish.LENGTH, Finish.NONE)).astype(np.uint8)
