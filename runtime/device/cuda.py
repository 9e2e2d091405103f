"""The GPU as a device: steps are launched ahead of it, in one stream; a second thread waits for their ends and reports.

The launching thread never waits for the device: a step's arrays go through page-locked memory, its input ids are read
from the TokenTable by the device, its tokens are drawn there. It waits for masks, which come from the host, and, where
a request names a processor of the user's, for the steps before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from runtime.attention.flashinfer import PagedAttention
from runtime.batch import Batch, SlotTables
from runtime.device.accelerator import Accelerator, Event
from runtime.device.base import Masks, MaskSet
from runtime.device.device_times import DeviceTimes
from runtime.device.device_tokens import DeviceTokens
from runtime.device.graphs import DecodeGraph, size_for
from runtime.device.put import together
from runtime.device.staging import Staging
from runtime.device.told import Told, told_of_prompts
from runtime.model.llama import Llama
from runtime.sampling_on_device import Asked, DeviceSampler
from runtime.step import ID_DTYPE, StepPlan, StepResult

Tensor = torch.Tensor
Done = Callable[[StepResult], None]
STAGED = 1 << 20  # bytes of a step's arrays at first
PATIENCE = 10.0  # seconds for the steps in flight at the end
LONGEST = 60.0  # seconds that a step with a user's processors waits for the steps before


class Table(Protocol):
    """What stands behind `DeviceTokens`: `ipc.device_table.DeviceTable` is one."""

    def commit(self, step: int, stream: int) -> None:
        """All that writes the step's entry is in `stream`. Does not wait."""

    def wait(self, step: int) -> None:
        """Until a committed step's ids are where the scheduler reads them."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Places:
    """Where a step's tokens and rows stand, on the device; int64."""

    step: Tensor  # [1]
    brought: Tensor  # slots of the rows whose ids came with the plan
    slots: Tensor  # [S] of the sampling rows
    rows: Tensor  # [S]
    last: Tensor  # [S] index of each one's last token among the T


class Marks(NamedTuple):
    """Of a step in the stream."""

    started: Event
    forwarded: Event  # all but its sampling is done; the device may wait for masks after it
    resumed: Event  # its sampling begins
    ended: Event


@dataclass(frozen=True)
class Launched:
    """A step in the stream. Times in nanoseconds."""

    plan: StepPlan
    batch: Batch
    done: Done
    received: int
    launched: int
    marks: Marks
    masks: MaskSet | None
    told: list[tuple[Told, Tensor]]  # log probabilities, and their arrays on the host once it has ended
    ids: Tensor | None  # int32[S] likewise, where a processor of the user's will ask for them


class CudaDevice:
    """`model` on `gpu`, `attention` over its pages; `graphs` of some sizes, without any each step is launched whole.

    `in_flight` steps at most are launched and not reported.
    """

    def __init__(
        self,
        gpu: Accelerator,
        model: Llama,
        attention: PagedAttention,
        sampler: DeviceSampler,
        tables: SlotTables,
        tokens: DeviceTokens,
        table: Table,
        masks: Masks,
        graphs: list[DecodeGraph],
        in_flight: int,
    ) -> None:
        self.gpu, self.model, self.attention, self.sampler = gpu, model, attention, sampler
        self.tables, self.tokens, self.table, self.masks = tables, tokens, table, masks
        self.graphs = {graph.size: graph for graph in graphs}
        self.sizes = sorted(self.graphs)
        self.staging = Staging(gpu, in_flight + 1, STAGED)
        self.put = self.staging.put
        self.failed: Exception | None = None
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._completed, self._news = -1, threading.Condition()
        with gpu.launching():
            anchor = gpu.event()
            anchor.record()
        anchor.synchronize()
        self._times = DeviceTimes(anchor, time.monotonic_ns())
        self._thread = threading.Thread(target=self._complete, name="gpu-completions", daemon=True)
        self._thread.start()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, done: Done) -> None:
        received = time.monotonic_ns()
        batch = self.tables.apply(plan)
        marks = Marks(*(self.gpu.event() for _ in range(4)))
        self.staging.begin()
        with self.gpu.launching():
            marks.started.record()
            self._admit(plan)
            places = self._places(batch)
            hidden = self._forward(batch, places)
            logits = self.model.logits(hidden.index_select(0, places.last))
            asked = self.sampler.prepare(batch.sample, self.put)
            marks.forwarded.record()
            masks = self.masks.wait(batch.step) if batch.masked else None
            if asked.needs_host:
                self._wait_for(batch.step - 1)
            marks.resumed.record()
            told, ids = self._sample(batch, places, hidden, logits, asked, masks)
            self.table.commit(batch.step, self.gpu.stream)
            marks.ended.record()
            self.staging.end()
        self._queue.put(Launched(plan, batch, done, received, time.monotonic_ns(), marks, masks, told, ids))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(PATIENCE)
        try:
            self.gpu.close()
        finally:
            self.table.close()

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            ids = np.frombuffer(admission.history, ID_DTYPE)
            self.sampler.admit(admission.slot, admission.sampling, admission.num_prompt, ids, self.put)

    def _places(self, batch: Batch) -> Places:
        rows, step = batch.sample_rows, np.array([batch.step])
        arrays = step, batch.slots[batch.num_decode :], batch.slots[rows], rows, batch.last_tokens
        return Places(*together(self.put, [array.astype(np.int64) for array in arrays]))

    def _forward(self, batch: Batch, places: Places) -> Tensor:
        """The normed states of the step's tokens, [T, hidden_size]."""
        size = size_for(self.sizes, batch.num_decode) if batch.num_decode == len(batch.slots) else None
        if size is not None:
            return self.graphs[size].run(batch, self.put)
        decode = batch.slots[: batch.num_decode]
        arrays = decode, batch.input_ids[batch.num_decode :], batch.positions, batch.reach
        slots, brought, positions, reach = together(self.put, [array.astype(np.int64) for array in arrays])
        attention = self.attention.plan(batch, self.put)
        self.tokens.poison(places.step, places.brought)
        taken = self.tokens.gather(places.step, slots, self.model.config.vocab_size)
        return self.model.forward(torch.cat((taken.long(), brought)), positions, reach, attention)

    def _sample(
        self, batch: Batch, places: Places, hidden: Tensor, logits: Tensor, asked: Asked, masks: MaskSet | None
    ) -> tuple[list[tuple[Told, Tensor]], Tensor | None]:
        """Draw and publish; the log probabilities that were asked for, and the ids if the host will need them."""
        sampler, vocab = self.sampler, self.tables.sampling.vocab
        told = told_of_prompts(batch, vocab, hidden, self.model.logits, self.put) if batch.prompts else []
        raw = sampler.raw(logits, asked)
        ids = sampler.draw(logits, asked, masks, self.put)
        self.tokens.publish(places.step, places.rows, places.slots, ids[:, None])
        if raw is not None:
            told.append(sampler.told(raw, asked, ids))
        fetch = self.staging.fetch
        return [(one, fetch(one.packed)) for one in told], fetch(ids) if asked.needs_host else None

    def _wait_for(self, step: int) -> None:
        """Until a step is done, and the host knows its ids."""
        with self._news:
            if not self._news.wait_for(lambda: self._completed >= step or self.failed is not None, LONGEST):
                raise TimeoutError(f"step {step} has not ended in {LONGEST:.0f} s")

    def _complete(self) -> None:
        self.gpu.enter_thread()
        try:
            while (step := self._queue.get()) is not None:
                self._report(step)
        except Exception as error:
            self.failed = error
        with self._news:
            self._news.notify_all()

    def _report(self, step: Launched) -> None:
        """Wait for the end of a step and tell of it."""
        self.table.wait(step.batch.step)
        marks, masks = step.marks, step.masks
        marks.ended.synchronize()
        started, ended = self._times.step(marks.started, marks.ended, time.monotonic_ns())
        if step.ids is not None:
            step.batch.sample.drawn(step.ids.numpy())
        with self._news:
            self._completed = step.batch.step
            self._news.notify_all()
        masking = masks.written - masks.ordered if masks else 0
        exposed = round(marks.forwarded.elapsed_ms(marks.resumed) * 1e6) if masks else 0
        logprobs = [one for told, packed in step.told for one in told.logprobs(packed.numpy())]
        times = step.received, step.launched, started, ended, time.monotonic_ns()
        step.done(StepResult(step.plan.epoch, step.plan.step, *times, logprobs, masking, exposed))
