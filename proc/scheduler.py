"""The scheduler process: the engine's loop between its inboxes and its outboxes. Knows no text and no device."""

from __future__ import annotations

import logging
import time
from typing import Any, TypeVar

import numpy as np

from ipc.cuda_runtime import Cudart
from ipc.device_table import DeviceReader
from ipc.endpoints import address
from ipc.histogram import MICROSECONDS, SECONDS, Histogram, histogram
from ipc.internal import (
    Admit,
    Alive,
    Ask,
    Cancel,
    Load,
    Rejected,
    ReplicaReady,
    Started,
    TableExport,
    TokenBatch,
    Told,
    ToScheduler,
    ToTokenizer,
)
from ipc.sockets import Receiver, Sender
from ipc.token_table import TokenTable
from proc.device_clock import COLUMNS, DeviceClock
from proc.role import Command, Poller, ProcessSpec
from proc.shapes import table_shape
from runtime.device.base import DeviceInfo
from runtime.in_flight import Outputs
from runtime.limits import Limits
from runtime.request import AdmissionError, Request
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler
from runtime.step import MaskOrder, SampleHalf, StepPlan, StepResult

log = logging.getLogger(__name__)
N = TypeVar("N", int, float)
Word = TypeVar("Word")
COLDEST = 1e-5  # temperatures below it are greedy, as in vLLM
TURN = 64  # messages taken between two plans


class SchedulerLoop:
    """One replica's loop. `turn` never waits for a step that could be planned past."""

    finished = False
    engine: Scheduler
    clock: DeviceClock

    def __init__(self, spec: ProcessSpec, index: int) -> None:
        self.spec, self.index = spec, index
        self.arrived: dict[int, int] = {}  # ns, of the requests that have no slot yet
        self.waited: dict[int, int] = {}  # ns in the queue, of those whose first step is in flight
        self.queued = histogram(SECONDS)
        self.planned = histogram(MICROSECONDS)
        self.steps_ahead = 0  # results that came when the plan of the next step had been sent already
        self.table: TokenTable | DeviceReader = TokenTable(table_shape(spec.settings), spec.tables[index])
        self.requests: Receiver[ToScheduler] = Receiver(address(spec.run_dir, "scheduler", index, "in"), ToScheduler)
        kinds = DeviceInfo | TableExport | StepResult | Alive
        self.results: Receiver[DeviceInfo | TableExport | StepResult | Alive] = Receiver(
            address(spec.run_dir, "scheduler", index, "results"), kinds
        )
        self.plans: list[Sender[StepPlan]] = [
            Sender(address(spec.run_dir, "worker", n, "plans")) for n in spec.workers(index)
        ]
        self.halves: list[Sender[SampleHalf]] = [
            Sender(address(spec.run_dir, "worker", n, "halves")) for n in spec.workers(index)
        ]
        self.grammar: Sender[MaskOrder | ReplicaReady] = Sender(address(spec.run_dir, "grammar", index, "in"))
        self.tokenizers: list[Sender[ToTokenizer]] = [
            Sender(address(spec.run_dir, "tokenizer", n, "in")) for n in range(spec.num_tokenizers)
        ]

    @property
    def sockets(self) -> list[Any]:
        return [self.requests.socket, self.results.socket]

    def start(self) -> dict[str, Any]:
        """Wait for the worker's word of what there is, and pass it on. Raises `TimeoutError`."""
        settings, info = self.spec.settings, self.heard(DeviceInfo)
        self.engine = Scheduler(
            Limits(
                info.num_blocks,
                settings.block_size,
                info.max_model_len,
                settings.max_num_seqs,
                settings.max_num_batched_tokens,
                settings.max_num_queued_reqs,
                settings.depth,
                info.shares_prefixes and not settings.disable_radix_cache,
            )
        )
        if info.exports_table:
            self.table = DeviceReader.open(Cudart(), self.heard(TableExport), self.engine.epoch)
        self.clock = DeviceClock(self.spec.num_ranks)
        ready = ReplicaReady(
            self.index, info.max_model_len, info.vocab_size, info.num_blocks, settings.block_size, info.description
        )
        self.grammar.send(ready)
        for tokenizer in self.tokenizers:
            tokenizer.send(ready)
        self.vocab_size = info.vocab_size
        return {}

    def heard(self, kind: type[Word]) -> Word:
        """Rank 0's next word of a kind; other ranks may be ready before it. Raises `TimeoutError`."""
        timeout = self.spec.settings.startup_timeout
        deadline = time.monotonic() + timeout
        while (word := self.results.receive(max(0.001, deadline - time.monotonic()))) is not None:
            if isinstance(word, kind):
                return word
        raise TimeoutError(f"the worker was not ready within {timeout:.0f} s")

    def turn(self, poller: Poller) -> None:
        """Receive, commit a result, plan ahead and send the plans, deliver tokens; blocked when there is nothing."""
        poller.wait()
        self.take_requests()
        outputs = self.take_result()
        self.order_masks()
        self.plan_ahead()
        if outputs is not None:
            self.deliver(outputs)

    def take_result(self) -> Outputs | None:
        result = self.results.receive(0)
        if result is None:
            return None
        engine, taken = self.engine, time.monotonic_ns()
        if isinstance(result, Alive):
            self.clock.lives(result.index, taken)
        if not isinstance(result, StepResult):
            return None
        self.steps_ahead += len(engine.in_flight) > 1
        ids, _ = self.table.read(result.step, engine.in_flight.records[0].rows)
        outputs = engine.commit(result.step, ids[:, 0], result.logprobs)
        self.clock.committed(result, taken, len(ids), engine.num_running, engine.num_waiting, engine.num_used_blocks)
        return outputs

    def plan_ahead(self) -> None:
        """Send every step that can be planned now."""
        while True:
            began = time.monotonic_ns()
            plan = self.engine.plan()
            if plan is None:
                return
            for worker in self.plans:
                worker.send(plan)
            self.order_masks()
            sent = time.monotonic_ns()
            self.clock.sent(began, sent)
            self.planned.add((sent - began) / 1e9)
            for slot in plan.admitted:
                arrived = self.arrived.pop(int(self.engine.slots.request[slot.slot]), None)
                if arrived is not None:
                    self.queued.add((sent - arrived) / 1e9)
                    self.waited[int(self.engine.slots.request[slot.slot])] = sent - arrived

    def order_masks(self) -> None:
        """Have the masks of the oldest step computed while its forward pass runs, as soon as its ids are known."""
        order = self.engine.in_flight.order_masks(time.monotonic_ns())
        if isinstance(order, MaskOrder):
            self.grammar.send(order)
        elif order is not None:
            for worker in self.halves:
                worker.send(order)

    def take_requests(self) -> None:
        """What has arrived, up to a number: the next plan must not wait for a burst."""
        for _ in range(TURN):
            message = self.requests.receive(0)
            if message is None:
                return
            if isinstance(message, Cancel):
                self.arrived.pop(message.request, None)
                self.engine.cancel(message.request)
            elif message.tokenizer >= len(self.tokenizers):
                log.warning("dropped a message of tokenizer %d, which there is not", message.tokenizer)
            elif isinstance(message, Ask):
                self.tokenizers[message.tokenizer].send(self.answer(message))
            else:
                self.admit(message)

    def admit(self, message: Admit) -> None:
        if not self.engine.has_work:
            self.clock.work_since = time.monotonic_ns()
        try:
            self.engine.admit(self.resolve(message))
            self.arrived[message.request] = time.monotonic_ns()
        except AdmissionError as error:
            self.tokenizers[message.tokenizer].send(Rejected(message.request, error.code, str(error), error.param))
        except (ValueError, OverflowError) as error:  # arrays that are none, numbers no engine has
            log.warning("dropped an admission that cannot be read: %s", error)

    def answer(self, ask: Ask) -> Load:
        if ask.steps:
            return Load(self.index, ask.ask, {}, {}, list(COLUMNS), self.clock.last(ask.steps))
        return Load(self.index, ask.ask, self.figures(), self.histograms)

    def resolve(self, message: Admit) -> Request:
        """The caller's wishes turned into what the engine does. Raises `AdmissionError` for ids that cannot be."""
        params, limits = message.params, self.engine.limits
        self._check_ids(message)
        temperature = _known(params.temperature, 1.0)
        sampling = Sampling(
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_k=min(max(params.top_k or 0, 0), self.vocab_size),
            top_p=_known(params.top_p, 1.0),
            min_p=params.min_p or 0.0,
            seed=message.seed,
            min_tokens=min(params.min_tokens, limits.max_model_len),
            stop_ids=tuple(params.stop_token_ids),
            vocab=min(message.vocab, self.vocab_size),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=_known(params.repetition_penalty, 1.0),
            logit_bias=tuple(params.logit_bias.items()),
            allowed_ids=tuple(params.allowed_token_ids or ()),
            bad_words=tuple(message.bad_words),
            logprobs=_known(params.logprobs, -1),
            prompt_logprobs=_known(params.prompt_logprobs, -1),
            constrained=message.constrained,
            processors=tuple(params.logits_processors),
        )
        prompt, output = (np.frombuffer(ids, "<i4") for ids in (message.prompt_ids, message.output_ids))
        most = params.max_tokens or limits.max_model_len
        return Request(message.request, prompt, sampling, most, output, message.priority, message.tokenizer)

    def _check_ids(self, message: Admit) -> None:
        """Raises `AdmissionError` for ids that the model, or for what is to be drawn the tokenizer, does not have."""
        params = message.params
        for param, ids, most in (
            ("prompt", np.frombuffer(message.prompt_ids, "<i4"), self.vocab_size),
            ("output_ids", np.frombuffer(message.output_ids, "<i4"), self.vocab_size),
            ("stop_token_ids", np.array(params.stop_token_ids, np.int64), self.vocab_size),
            ("allowed_token_ids", np.array(params.allowed_token_ids or [], np.int64), message.vocab or self.vocab_size),
            ("logit_bias", np.array(list(params.logit_bias), np.int64), self.vocab_size),
        ):
            if ((ids < 0) | (ids >= most)).any():
                raise AdmissionError(param, f"token ids must be between 0 and {most - 1}")

    def deliver(self, outputs: Outputs) -> None:
        """One message to each tokenizer that has tokens, or a request that started, in this step."""
        started = [
            (source, Started(request, cached, self.waited.pop(request, 0)))
            for request, source, cached in outputs.started
        ]
        told = [
            (source, Told(request, offset, one.width, one.ids, one.values, one.ranks))
            for request, source, offset, one in outputs.logprobs
        ]
        for index in sorted({*np.unique(outputs.sources).tolist(), *(source for source, _ in (*started, *told))}):
            mine = outputs.sources == index
            self.tokenizers[index].send(
                TokenBatch(
                    self.index,
                    outputs.step,
                    outputs.requests[mine].astype("<u8").tobytes(),
                    outputs.offsets[mine].astype("<i4").tobytes(),
                    outputs.ids[mine].astype("<i4").tobytes(),
                    outputs.finishes[mine].tobytes(),
                    [one for source, one in started if source == index],
                    [one for source, one in told if source == index],
                )
            )
        self.clock.delivered()

    @property
    def histograms(self) -> dict[str, Histogram]:
        return {"request_queue_time_seconds": self.queued, "step_plan_seconds": self.planned}

    def figures(self) -> dict[str, float]:
        """What /status sums over the replicas."""
        engine, limits = self.engine, self.engine.limits
        return {
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "free_slots": len(engine.slots.free),
            "num_slots": limits.slots - 1,
            "available_blocks": engine.cache.num_available,
            "num_blocks": limits.num_blocks - 1,
            "cached_blocks": len(engine.cache),
            "preemptions": engine.num_preemptions,
            "prefix_cache_queries": engine.num_looked_up,
            "prefix_cache_hits": engine.num_found,
            "overshoot_rows": engine.in_flight.num_overshoot,
            "committed_tokens": engine.in_flight.num_committed,
            "steps": engine.num_steps,
            "steps_planned_ahead": self.steps_ahead,
            **self.clock.figures(engine.has_work),
        }

    def command(self, command: Command) -> None:
        """A scheduler has nothing to drain of its own: the tokenizers end first."""

    def close(self) -> None:
        self.requests.close()
        self.results.close()
        if isinstance(self.table, DeviceReader):
            self.table.close()
        self.grammar.close()
        for plans, halves in zip(self.plans, self.halves, strict=True):
            plans.close()
            halves.close()
        for tokenizer in self.tokenizers:
            tokenizer.close()


def _known(value: N | None, otherwise: N) -> N:
    return otherwise if value is None else value
