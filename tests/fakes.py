"""Stand-ins for the parts around the engine: tokens in memory, and an engine whose every hand-over may be delayed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.batch import SlotTables
from runtime.device.sim import HashModel, SimDevice
from runtime.limits import Limits
from runtime.request import NO_IDS, Finish, Request
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler
from runtime.step import StepPlan, StepResult

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


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE


class Engine:
    """Scheduler, simulated device and tokens in one process, with queues where processes would stand."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        self.limits = limits
        self.random = random.Random(seed)
        self.scheduler = Scheduler(limits)
        self.tokens = MemoryTokens(limits.slots, limits.depth + 2, limits.max_num_seqs)
        pages = -(-limits.max_model_len // limits.block_size)
        tables = SlotTables(limits.slots, pages, limits.block_size)
        self.device = SimDevice(HashModel(tables, self.tokens, limits.num_blocks))
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.answers: dict[int, Answer] = {}
        self.most_in_flight = 0
        self.computed_tokens = 0

    def admit(self, request: Request) -> None:
        self.scheduler.admit(request)
        self.answers[request.id] = Answer(request.output_ids.tolist())

    def turn(self) -> bool:
        """One hand-over, drawn among those possible; False when there is none."""
        plan = self.scheduler.plan() if self.random.random() < 0.7 or not (self.plans or self.results) else None
        if plan is not None:
            self.plans.append(plan)
            self.most_in_flight = max(self.most_in_flight, len(self.scheduler.records))
            self.computed_tokens += len(plan.decode_slots) // 2 + len(plan.chunk_ids) // 4
            return True
        if self.plans and (not self.results or self.random.random() < 0.5):
            self.device.launch(self.plans.popleft(), self.results.append)
            return True
        if self.results:
            self._commit(self.results.popleft())
            return True
        return False

    def _commit(self, result: StepResult) -> None:
        record = self.scheduler.records[0]
        out = self.scheduler.commit(result.step, self.tokens.read(result.step, record.rows))
        for request, offset, token, finish in zip(out.requests, out.offsets, out.ids, out.finishes, strict=True):
            answer = self.answers[int(request)]
            assert offset == len(answer.ids), "a token was lost or doubled"
            assert answer.finish == Finish.NONE, "a token after the last word"
            answer.ids.append(int(token))
            answer.finish = Finish(finish)

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
