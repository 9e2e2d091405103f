"""A real worker process: plans over ZMQ, ids through a shared memfd, the next plan sent before the last result."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ipc.sockets import Receiver, Sender
from ipc.token_table import Shape, TokenTable
from proc.worker import WorkerSpec
from runtime.scheduler import Limits, Scheduler
from runtime.step import StepPlan, StepResult
from tests.fakes import Engine, request

ROOT = Path(__file__).parent.parent.parent
LIMITS = Limits(num_blocks=33, block_size=4, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)


class Pair:
    """The scheduler in this process, the worker in another."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        shape = Shape(limits.slots, limits.depth + 2, limits.max_num_seqs)
        fd = TokenTable.create_fd(shape)
        spec = WorkerSpec(limits, shape, fd, f"ipc://{folder}/plans", f"ipc://{folder}/results")
        self.scheduler, self.table = Scheduler(limits), TokenTable(shape, fd)
        self.results = Receiver(spec.results, StepResult)
        self.plans: Sender[StepPlan] = Sender(spec.plans)
        command = [sys.executable, "-m", "proc.worker", msgspec.json.encode(spec).decode()]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[fd])
        self.sent: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.answers: dict[int, list[int]] = {}

    def run(self) -> None:
        while not self.scheduler.idle:
            while (plan := self.scheduler.plan()) is not None:
                self.plans.send(plan)
                self.sent[plan.step] = time.monotonic_ns()
            result = self.results.receive(timeout=30.0)
            assert result is not None, "the worker does not answer"
            self.seen[result.step] = time.monotonic_ns()
            ids, counts = self.table.read(result.step, self.scheduler.records[0].rows)
            assert (counts == 1).all()
            out = self.scheduler.commit(result.step, ids[:, 0])
            for number, token in zip(out.requests.tolist(), out.ids.tolist(), strict=True):
                self.answers.setdefault(number, []).append(token)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.plans.close()
        self.results.close()


@pytest.fixture(params=[0, 1, 2])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, replace(LIMITS, depth=request.param))
    yield pair
    pair.close()


def test_the_same_tokens_as_in_one_process_and_plans_ahead(pair: Pair) -> None:
    engine = Engine(pair.scheduler.limits)
    for number in range(12):
        one = request(number, [number] * (3 + 5 * number), 40, temperature=1.0, seed=number)
        engine.admit(one)
        pair.scheduler.admit(one)
    engine.run()
    pair.run()
    assert pair.answers == {number: answer.ids for number, answer in engine.answers.items()}
    ahead = [step for step in pair.seen if step + 1 in pair.sent and pair.sent[step + 1] < pair.seen[step]]
    assert len(ahead) > len(pair.seen) // 2 if pair.scheduler.limits.depth else not ahead
