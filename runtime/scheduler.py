"""The scheduler: the plan of each step, preemption, and giving back, as arrays and without I/O.

One invariant instead of phases: a request has `num_tokens` (known or in flight) and `num_computed`, and scheduling
means letting computed catch up within the token budget. `plan` may be called while up to `depth` results are
outstanding; `commit` takes the results in order. Nothing is given back before the last step that names it is
acknowledged. Who waits is `WaitingQueue`, what has been sent `StepsInFlight`. Knows no socket, no clock, no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.in_flight import Outputs, StepsInFlight
from runtime.limits import Limits
from runtime.pages import Growth, SlotPages
from runtime.request import NO_IDS, AdmissionError, Request
from runtime.slots import Slots, SlotState
from runtime.step import ID_DTYPE, SLOT_DTYPE, Logprobs, SlotAdmission, StepPlan
from runtime.waiting import WaitingQueue

I32 = NDArray[np.int32]


class Scheduler:
    """Plans steps for one worker. `limits` is fixed for its life."""

    def __init__(self, limits: Limits, epoch: int = 0) -> None:
        self.limits, self.epoch = limits, epoch
        self.slots = Slots(limits.slots, limits.max_model_len, limits.block_size)
        self.pages = SlotPages(self.slots, limits)
        self.cache = self.pages.cache
        self.in_flight = StepsInFlight(self.slots, epoch)
        self.queue = WaitingQueue(limits)
        self.active: I32 = np.zeros(0, np.int32)  # slots that need further rows, by (priority, arrival)
        self.num_preemptions = 0
        self.num_looked_up = self.num_found = 0  # prompt tokens, in the prefix cache
        self.num_steps = 0
        self._running: dict[int, int] = {}  # request id → slot
        self._requests: dict[int, Request] = {}  # by slot, until that is free
        self._marked: dict[int, None] = {}  # slots to give back once acknowledged, in order

    # -- requests

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

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
    def idle(self) -> bool:
        """Nothing to plan, nothing in flight, nothing to give back."""
        return not (self.queue or self._running or self.in_flight or self._marked)

    def admit(self, request: Request) -> None:
        """Queue a request. Raises `AdmissionError` for one that can never run or that the queue has no room for."""
        if request.id in self._running:
            raise AdmissionError("id", f"request {request.id} is live already")
        self.queue.admit(request)

    def cancel(self, request_id: int) -> bool:
        """End a request without a further token; False if it is not live."""
        if self.queue.discard(request_id):
            return True
        if request_id not in self._running:
            return False
        self._end([request_id])
        self._give_back()
        return True

    # -- planning

    def plan(self) -> StepPlan | None:
        """The next step, or None: nothing is runnable, or `depth` results are outstanding already."""
        if len(self.in_flight) > self.limits.depth:
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
            request = self.queue.first()
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

    def _start(self, request: Request, prefix: I32, admissions: list[SlotAdmission]) -> int:
        """Give the first of the queue a slot whose first pages are the (held) cached prefix."""
        self.queue.pop()
        limit = min(len(request.prompt_ids) + request.max_tokens, self.limits.max_model_len)
        field = self.slots
        slot = field.assign(request, limit)
        field.num_computed[slot] = len(prefix) * self.limits.block_size
        field.num_pages[slot] = field.num_cached[slot] = len(prefix)
        field.pages[slot, : len(prefix)] = prefix
        self._running[request.id] = slot
        self._requests[slot] = request
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
        step, self.num_steps = self.num_steps, self.num_steps + 1
        field.last_step[slots] = step
        self.active = self.active[field.num_tokens[self.active] < field.limit[self.active]]
        sampling = np.concatenate((samples[decode], samples[~decode]))
        masked = self.in_flight.add(step, sampling, np.concatenate((slots[decode], chunks)), admissions)
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
            masked,
        )

    # -- results

    def commit(self, step: int, ids: I32, logprobs: Sequence[Logprobs] = ()) -> Outputs:
        """Take the result of the oldest step in flight, as `StepsInFlight.commit` does, and end what is over."""
        outputs = self.in_flight.commit(step, ids, logprobs)
        self._end(outputs.ended)
        self._give_back()
        return outputs

    # -- giving back

    def _end(self, requests: list[int]) -> None:
        self._mark(np.array([self._running.pop(request) for request in requests], np.int32), SlotState.ENDED)

    def _mark(self, slots: I32, state: SlotState) -> None:
        """No further row for the slots; each comes back once its last step is acknowledged. Idempotent."""
        self._marked.update(dict.fromkeys(slots.tolist()))
        self.slots.state[slots] = state
        self.active = self.active[self.slots.state[self.active] == SlotState.RUNNING]

    def _give_back(self) -> None:
        for slot in [slot for slot in self._marked if self.slots.last_step[slot] <= self.in_flight.acknowledged]:
            del self._marked[slot]
            self._free(slot)

    def _free(self, slot: int) -> None:
        """The one place where a slot and its pages return; a preempted request returns to the queue."""
        request = self._requests.pop(slot)
        self.pages.release(slot)
        if self.slots.state[slot] == SlotState.PREEMPTING:
            self._requeue(slot, request)
        self.slots.release(slot)

    def _requeue(self, slot: int, request: Request) -> None:
        output = self.slots.tokens[slot, self.slots.num_prompt[slot] : self.slots.committed[slot]].copy()
        del self._running[request.id]
        if self.slots.num_computed[slot] >= self.slots.num_prompt[slot]:  # of the prompt all has been told
            request = replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=-1))
        self.queue.push(replace(request, output_ids=output))
