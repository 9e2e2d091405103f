"""Stand-ins for the parts around the engine: tokens in memory, and an engine whose every hand-over may be delayed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.batch import SlotTables
from runtime.device.base import MaskSet
from runtime.device.sim import HashModel, SimDevice
from runtime.limits import Limits
from runtime.request import NO_IDS, Finish, Request
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler
from runtime.step import MaskOrder, StepPlan, StepResult

I32 = NDArray[np.int32]


class MemoryTokens:
    """`runtime.device.base.Tokens` without sharing: the ring poisoned before use and checked when read."""

    def __init__(self, num_slots: int, ring: int, rows: int) -> None:
        self.next = np.zeros(num_slots, np.int32)
        self.ids = np.full((ring, rows), -1, np.int32)
        self.stamp = np.full(ring, -1, np.int64)

    def poison(self, step: int, rows: I32) -> None:
        self.ids[step % len(self.ids), rows] = -1
        self.stamp[step % len(self.ids)] = step

    def publish(self, step: int, rows: I32, slots: I32, ids: I32) -> None:
        self.ids[step % len(self.ids), rows] = ids[:, -1]
        self.next[slots] = ids[:, -1]

    def read(self, step: int, rows: I32) -> I32:
        assert self.stamp[step % len(self.ids)] == step, "a stale ring entry was read"
        ids: I32 = self.ids[step % len(self.ids), rows]
        assert (ids >= 0).all(), "a poisoned id was read"
        return ids


class ModuloGrammar:
    """Allows after each token the ids whose remainder by 7 is that token's plus its index; keeps its own account."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.known: dict[int, list[int]] = {}  # request → output so far
        self.ready: dict[int, MaskSet] = {}
        self.busiest = 0

    def allows(self, output: list[int]) -> I32:
        wanted = (output[-1] + len(output) if output else 3) % 7
        ids: I32 = np.arange(wanted, self.vocab_size, 7, dtype=np.int32)
        return ids

    def follow(self, request: int, output: list[int]) -> None:
        self.known[request] = list(output)

    def answer(self, order: MaskOrder) -> None:
        rows, offsets, ids = (np.frombuffer(part, "<i4") for part in (order.rows, order.offsets, order.ids))
        requests = np.frombuffer(order.requests, "<u8").tolist()
        bits = np.zeros((len(rows), -(-self.vocab_size // 32)), np.uint32)
        for n, (request, offset, token) in enumerate(zip(requests, offsets.tolist(), ids.tolist(), strict=True)):
            output = self.known[request]
            assert offset in (len(output), len(output) - 1), "a mask was ordered with a token missing"
            if offset == len(output):
                assert token in self.allows(output), "a token that its mask forbids"
                output.append(token)
            allowed = self.allows(output)
            np.bitwise_or.at(bits[n], allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))
        self.busiest = max(self.busiest, len(rows))
        self.ready[order.step] = MaskSet(rows.astype(np.int64), bits, 0, 0, 0)

    def wait(self, step: int) -> MaskSet:
        return self.ready.pop(step)


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    logprobs: dict[int, tuple[bytes, bytes, bytes]] = field(default_factory=dict)  # by index of the output token


class Engine:
    """Scheduler, simulated device and tokens in one process, with queues where processes would stand."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        self.limits = limits
        self.random = random.Random(seed)
        self.scheduler = Scheduler(limits)
        self.tokens = MemoryTokens(limits.slots, limits.depth + 2, limits.max_num_seqs)
        pages = -(-limits.max_model_len // limits.block_size)
        tables = SlotTables(limits.slots, pages, limits.block_size)
        model = HashModel(tables, self.tokens, limits.num_blocks)
        self.grammar = ModuloGrammar(model.vocab_size)
        self.device = SimDevice(model, self.grammar)
        self.orders: deque[MaskOrder] = deque()
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.answers: dict[int, Answer] = {}
        self.most_in_flight = 0
        self.computed_tokens = 0

    def admit(self, request: Request) -> None:
        self.scheduler.admit(request)
        self.answers[request.id] = Answer(request.output_ids.tolist())
        self.grammar.follow(request.id, request.output_ids.tolist())

    def turn(self) -> bool:
        """One hand-over, drawn among those possible; False when there is none."""
        plan = self.scheduler.plan() if self.random.random() < 0.7 or not (self.plans or self.results) else None
        if plan is not None:
            self.plans.append(plan)
            self.most_in_flight = max(self.most_in_flight, len(self.scheduler.in_flight))
            self.computed_tokens += len(plan.decode_slots) // 2 + len(plan.chunk_ids) // 4
            self._order()
            return True
        if self.orders and (not self.results or self.random.random() < 0.5):
            self.grammar.answer(self.orders.popleft())
            return True
        ready = self.plans and (not self.plans[0].masked or self.plans[0].step in self.grammar.ready)
        if ready and (not self.results or self.random.random() < 0.5):
            self.device.launch(self.plans.popleft(), self.results.append)
            return True
        if self.results:
            self._commit(self.results.popleft())
            self._order()
            return True
        return False

    def _order(self) -> None:
        order = self.scheduler.in_flight.order_masks(0)
        if isinstance(order, MaskOrder):
            self.orders.append(order)
        elif order is not None:
            self.grammar.ready[order.step] = MaskSet(np.zeros(0, np.int64), np.zeros((0, 1), np.uint32), 0, 0, 0)

    def _commit(self, result: StepResult) -> None:
        record = self.scheduler.in_flight.records[0]
        out = self.scheduler.commit(result.step, self.tokens.read(result.step, record.rows), result.logprobs)
        for number, _, offset, told in out.logprobs:
            ids, values = np.frombuffer(told.ids, "<i4"), np.frombuffer(told.values, "<f4")
            for n, rank in enumerate(np.frombuffer(told.ranks, "<i4")):
                own = slice(n * told.width, (n + 1) * told.width)
                part = ids[own].tobytes(), values[own].tobytes(), rank.tobytes()
                first = self.answers[number].logprobs.setdefault(offset + n, part)  # told again after a preemption
                assert first[0] == part[0]
        for request, offset, token, finish in zip(out.requests, out.offsets, out.ids, out.finishes, strict=True):
            answer = self.answers[int(request)]
            assert offset == len(answer.ids), "a token was lost or doubled"
            assert answer.finish == Finish.NONE, "a token after the last word"
            answer.ids.append(int(token))
            answer.finish = Finish(finish)

    def serve(self, asked: list[Request], spread: bool) -> None:
        """All of them, to the end; `spread`: arrivals further apart than a request's life."""
        for one in asked:
            self.admit(one)
            while spread and self.turn():
                pass
        self.run()

    def run(self) -> None:
        while self.turn():
            pass
        assert self.scheduler.idle


def request(
    number: int, prompt: list[int], max_tokens: int = 8, output: list[int] | None = None, **sampling: object
) -> Request:
    """A request as short as a test wants it."""
    return Request(
        number,
        np.array(prompt, np.int32),
        Sampling(**sampling),  # type: ignore[arg-type]
        max_tokens,
        np.array(output, np.int32) if output else NO_IDS,
    )
