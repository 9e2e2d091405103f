"""The scheduler: admission, the plan of each step, finish rules and preemption, as arrays and without I/O.

One invariant instead of phases: a request has `num_tokens` (known or in flight) and `num_computed`, and scheduling
means letting computed catch up within the token budget. `plan` may be called while up to `depth` results are
outstanding; `commit` takes the results in order. Nothing is given back before the last step that names it is
acknowledged. Knows no socket, no clock, no text.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.limits import Limits
from runtime.pages import Growth, SlotPages
from runtime.request import NO_IDS, AdmissionError, Finish, Request
from runtime.slots import Slots, SlotState
from runtime.step import ID_DTYPE, SLOT_DTYPE, Logprobs, MaskOrder, SlotAdmission, StepPlan

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


class Scheduler:
    """Plans steps for one worker. `limits` is fixed for its life."""

    def __init__(self, limits: Limits, epoch: int = 0) -> None:
        self.limits = limits
        self.epoch = epoch
        self.slots = Slots(limits.slots, limits.max_model_len, limits.block_size)
        self.pages = SlotPages(self.slots, limits)
        self.cache = self.pages.cache
        self.records: deque[StepRecord] = deque()
        self.active: I32 = np.zeros(0, np.int32)  # slots that need further rows, by (priority, arrival)
        self.num_preemptions = 0
        self.num_looked_up = self.num_found = 0  # prompt tokens, in the prefix cache
        self.num_committed = 0  # tokens
        self.num_overshoot = 0  # rows computed for requests that had ended
        self._running: dict[int, int] = {}  # request id → slot
        self._requests: dict[int, Request] = {}  # waiting or running
        self._waiting: list[tuple[int, int, int]] = []  # heap of (priority, arrival, request id)
        self._marked: dict[int, None] = {}  # slots to give back once acknowledged, in order
        self._next_arrival = 0
        self._next_step = 0
        self._acknowledged = -1
        self._masks_ordered = -1  # the last step whose masks have been ordered

    # -- requests

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_used_blocks(self) -> int:
        """Pages that requests hold or that wait to come back; the scratch page and cached ones nobody holds apart."""
        return self.limits.num_blocks - 1 - self.cache.num_available

    @property
    def has_work(self) -> bool:
        """Some request still needs a row that is not planned."""
        return len(self.active) > 0 or self.num_waiting > 0 or (self.slots.state == SlotState.PREEMPTING).any()

    @property
    def num_steps(self) -> int:
        return self._next_step

    @property
    def idle(self) -> bool:
        """Nothing to plan, nothing in flight, nothing to give back."""
        return not (self._requests or self.records or self._marked)

    def admit(self, request: Request) -> None:
        """Queue a request. Raises `AdmissionError` for one that can never run or that the queue has no room for."""
        length = len(request.prompt_ids) + len(request.output_ids)
        if request.id in self._requests:
            raise AdmissionError("id", f"request {request.id} is live already")
        if not len(request.prompt_ids):
            raise AdmissionError("prompt", "the prompt is empty")
        if length >= self.limits.max_model_len:
            longest = self.limits.max_model_len - 1
            raise AdmissionError(
                "prompt", f"the prompt has {length} tokens, at most {longest} fit the model", "prompt_too_long"
            )
        if request.max_tokens <= len(request.output_ids):
            raise AdmissionError("max_tokens", "max_tokens leaves nothing to generate")
        queued = self.limits.max_num_queued
        if queued is not None and request.arrival is None and self.num_waiting >= queued:
            raise AdmissionError("queue", f"the queue is full ({queued} requests wait)", "queue_full")
        self._enqueue(request)

    def cancel(self, request_id: int) -> bool:
        """End a request without a further token; False if it is not live."""
        if self._requests.pop(request_id, None) is None:
            return False
        slot = self._running.pop(request_id, None)
        if slot is not None:
            self._mark(np.array([slot], np.int32), SlotState.ENDED)
            self._give_back()
        return True

    def _enqueue(self, request: Request) -> None:
        if request.arrival is None:
            request = replace(request, arrival=self._next_arrival)
            self._next_arrival += 1
        assert request.arrival is not None
        self._requests[request.id] = request
        heapq.heappush(self._waiting, (request.priority, request.arrival, request.id))

    # -- planning

    def plan(self) -> StepPlan | None:
        """The next step, or None: nothing is runnable, or `depth` results are outstanding already."""
        if len(self.records) > self.limits.depth:
            return None
        growth = Growth()
        slots, lens, starved = self._running_rows()
        self.pages.grow(slots, lens, growth)
        admissions: list[SlotAdmission] = []
        if not starved:
            budget = self.limits.max_num_batched_tokens - int(lens.sum())
            new_slots, new_lens = self._admit_waiting(budget, growth, admissions)
            slots, lens = np.concatenate((slots, new_slots)), np.concatenate((lens, new_lens))
        return self._build(slots, lens, growth, admissions) if len(slots) else None

    def _running_rows(self) -> tuple[I32, I32, bool]:
        """Active slots that get tokens and pages now, and whether some had to wait for pages.

        Preempts the last in order only where the pages on their way back fall short.
        """
        while True:
            slots, lens = self._share_budget()
            need = np.cumsum(self.pages.needed(slots, lens))
            fits = need <= self.cache.num_available
            if fits.all():
                return slots, lens, False
            short = int(need[-1]) - self.cache.num_available
            if self._promised() >= short or len(self.active) <= 1:
                return slots[fits], lens[fits], True
            self.num_preemptions += 1
            self._mark(self.active[-1:], SlotState.PREEMPTING)
            self._give_back()

    def _share_budget(self) -> tuple[I32, I32]:
        """Active slots with the tokens each may compute: decode rows one each, then prompts in order."""
        field, slots = self.slots, self.active
        want = field.num_tokens[slots] - field.num_computed[slots]
        prefill = np.flatnonzero(field.num_computed[slots] < field.num_prefill[slots])
        lens = np.ones(len(slots), np.int32)
        budget = self.limits.max_num_batched_tokens - (len(slots) - len(prefill))
        before = np.cumsum(want[prefill]) - want[prefill]
        lens[prefill] = np.clip(budget - before, 0, want[prefill])
        return slots[lens > 0], lens[lens > 0]

    def _promised(self) -> int:
        """Pages that come back without preempting: those of marked slots and of slots planned to their end."""
        leaving = (set(self._running.values()) - set(self.active.tolist())) | self._marked.keys()
        return sum(int((self.cache.pool.refs[self.pages.held(slot)] == 1).sum()) for slot in leaving)

    def _admit_waiting(self, budget: int, growth: Growth, admissions: list[SlotAdmission]) -> tuple[I32, I32]:
        """Start waiting requests while rows, slots, tokens and pages for their whole prompt are to be had."""
        slots: list[int] = []
        lens: list[int] = []
        while budget > 0 and self.slots.free and len(self.active) + len(slots) < self.limits.max_num_seqs:
            request = self._first_waiting()
            if request is None:
                break
            ids = np.concatenate((request.prompt_ids, request.output_ids))
            prefix = self.cache.match(ids if request.sampling.prompt_logprobs < 0 else NO_IDS)
            if -(-(len(ids) + 1) // self.limits.block_size) - len(prefix) > self.cache.num_available:
                self.cache.release(prefix)
                break
            slots.append(self._start(request, prefix, admissions))
            lens.append(min(budget, len(ids) - len(prefix) * self.limits.block_size))
            budget -= lens[-1]
            self.pages.start(slots[-1], lens[-1], growth)
        if slots:
            self.active = self._ordered(np.concatenate((self.active, np.array(slots, np.int32))))
        return np.array(slots, np.int32), np.array(lens, np.int32)

    def _first_waiting(self) -> Request | None:
        """The first in the queue that has not been cancelled; it stays there until started."""
        while self._waiting:
            _, arrival, request_id = self._waiting[0]
            request = self._requests.get(request_id)
            if request is not None and request_id not in self._running and request.arrival == arrival:
                return request
            heapq.heappop(self._waiting)
        return None

    def _start(self, request: Request, prefix: I32, admissions: list[SlotAdmission]) -> int:
        """Give the first of the queue a slot whose first pages are the (held) cached prefix."""
        _, arrival, _ = heapq.heappop(self._waiting)
        limit = min(len(request.prompt_ids) + request.max_tokens, self.limits.max_model_len)
        field = self.slots
        slot = field.assign(request, arrival, limit)
        field.num_computed[slot] = len(prefix) * self.limits.block_size
        field.num_pages[slot] = field.num_cached[slot] = len(prefix)
        field.pages[slot, : len(prefix)] = prefix
        self._running[request.id] = slot
        start = int(field.num_computed[slot])
        self.num_looked_up += int(field.num_prefill[slot])
        self.num_found += start
        pages = prefix.astype(ID_DTYPE).tobytes()
        known = field.tokens[slot, : field.committed[slot]] if request.sampling.needs_history else NO_IDS
        history = known.astype(ID_DTYPE).tobytes()
        admissions.append(SlotAdmission(slot, start, len(request.prompt_ids), pages, request.sampling, history))
        return slot

    def _ordered(self, slots: I32) -> I32:
        return slots[np.lexsort((self.slots.arrival[slots], self.slots.priority[slots]))]

    def _build(self, slots: I32, lens: I32, growth: Growth, admissions: list[SlotAdmission]) -> StepPlan:
        """Book the rows as planned and write them down."""
        field = self.slots
        computed = field.num_computed[slots]
        decode = computed >= field.num_prefill[slots]
        chunks, chunk_lens = slots[~decode], lens[~decode]
        ids = [field.tokens[s, c : c + n] for s, c, n in zip(chunks, computed[~decode], chunk_lens, strict=True)]
        field.num_computed[slots] += lens
        samples = field.num_computed[slots] == field.num_tokens[slots]
        field.num_tokens[slots[samples]] += 1
        step, self._next_step = self._next_step, self._next_step + 1
        field.last_step[slots] = step
        self.active = self.active[field.num_tokens[self.active] < field.limit[self.active]]
        order = np.concatenate((slots[decode], chunks))
        rows = np.flatnonzero(np.concatenate((samples[decode], samples[~decode]))).astype(np.int32)
        constrained = np.flatnonzero(field.constrained[order[rows]]).astype(np.int32)
        self.records.append(StepRecord(step, rows, order[rows], constrained, [self._started(a) for a in admissions]))
        return StepPlan(
            self.epoch,
            step,
            slots[decode].astype(SLOT_DTYPE).tobytes(),
            chunks.astype(SLOT_DTYPE).tobytes(),
            chunk_lens.astype(ID_DTYPE).tobytes(),
            samples[~decode].astype(np.uint8).tobytes(),
            np.concatenate(ids).astype(ID_DTYPE).tobytes() if ids else b"",
            np.concatenate(growth.owners).astype(SLOT_DTYPE).tobytes(),
            np.concatenate(growth.pages).astype(ID_DTYPE).tobytes(),
            admissions,
            bool(len(constrained)),
        )

    def _started(self, admission: SlotAdmission) -> tuple[int, int, int]:
        slot = admission.slot
        return int(self.slots.request[slot]), int(self.slots.source[slot]), admission.start

    # -- results

    def order_masks(self, now: int) -> MaskOrder | None:
        """For the oldest step in flight, once: what its masks depend on is known now. `now` in nanoseconds.

        None where no row of it needs one. Rows whose request has ended get none; the order is due all the same, since
        the worker waits for its answer.
        """
        if not self.records or self.records[0].step <= self._masks_ordered:
            return None
        record, field = self.records[0], self.slots
        self._masks_ordered = record.step
        if not len(record.constrained):
            return None
        live = self._live(record.slots[record.constrained])
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

    def _live(self, slots: I32) -> NDArray[np.bool_]:
        state = self.slots.state[slots]
        live: NDArray[np.bool_] = (state == SlotState.RUNNING) | (state == SlotState.PREEMPTING)
        return live

    def commit(self, step: int, ids: I32, logprobs: Sequence[Logprobs] = ()) -> Outputs:
        """Take the ids of the oldest step in flight, int32[S] as `records[0].rows` names them.

        Rows whose request has ended are dropped. Raises `RuntimeError` when the results come out of order.
        """
        record = self.records.popleft()
        if record.step != step or len(ids) != len(record.rows):
            raise RuntimeError(f"result of step {step} with {len(ids)} ids, expected step {record.step}")
        self._acknowledged = step
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
        outputs = Outputs(step, field.request[slots], field.source[slots], offsets, ids, finishes, told, record.started)
        self._end(slots[finishes != Finish.NONE])
        self._give_back()
        return outputs

    def _told(self, one: Logprobs) -> tuple[int, int, int, Logprobs]:
        field, slot = self.slots, one.slot
        return int(field.request[slot]), int(field.source[slot]), one.first - int(field.num_prompt[slot]), one

    def _finishes(self, slots: I32, ids: I32) -> NDArray[np.uint8]:
        field = self.slots
        stop = (field.stop_ids[slots] == ids[:, None]).any(1) & (field.committed[slots] > field.min_stop[slots])
        length = field.committed[slots] >= field.limit[slots]
        return np.where(stop, Finish.STOP, np.where(length, Finish.LENGTH, Finish.NONE)).astype(np.uint8)

    # -- giving back

    def _end(self, slots: I32) -> None:
        for request_id in self.slots.request[slots].tolist():
            self._requests.pop(request_id, None)
            self._running.pop(request_id, None)
        self._mark(slots, SlotState.ENDED)

    def _mark(self, slots: I32, state: SlotState) -> None:
        """No further row for the slots; each comes back once its last step is acknowledged. Idempotent."""
        self._marked.update(dict.fromkeys(slots.tolist()))
        self.slots.state[slots] = state
        self.active = self.active[self.slots.state[self.active] == SlotState.RUNNING]

    def _give_back(self) -> None:
        for slot in [slot for slot in self._marked if self.slots.last_step[slot] <= self._acknowledged]:
            del self._marked[slot]
            self._free(slot)

    def _free(self, slot: int) -> None:
        """The one place where a slot and its pages return; a preempted request returns to the queue."""
        field = self.slots
        self.pages.release(slot)
        if field.state[slot] == SlotState.PREEMPTING:
            self._requeue(slot)
        field.state[slot] = SlotState.FREE
        field.free.append(slot)

    def _requeue(self, slot: int) -> None:
        request_id = int(self.slots.request[slot])
        output = self.slots.tokens[slot, self.slots.num_prompt[slot] : self.slots.committed[slot]].copy()
        arrival = int(self.slots.arrival[slot])
        del self._running[request_id]
        request = self._requests[request_id]
        if self.slots.num_computed[slot] >= self.slots.num_prompt[slot]:  # of the prompt all has been told
            request = replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=-1))
        self._enqueue(replace(request, output_ids=output, arrival=arrival))
