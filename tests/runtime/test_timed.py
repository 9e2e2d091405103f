"""The simulated device that takes time: a queue in absolute time, and the same tokens as without time."""

from __future__ import annotations

import queue
import time

import numpy as np
import pytest

from runtime.batch import SlotTables
from runtime.device.launch import KINDS, launch_work
from runtime.device.roofline import Accelerator, Model, Roofline
from runtime.device.sim import HashModel, SimDevice
from runtime.device.timed import Alarm, TimedSimDevice
from runtime.limits import Limits
from runtime.scheduler import Scheduler
from runtime.step import StepPlan, StepResult
from tests.fakes import MemoryTokens, ModuloGrammar, request

# 5 ms for a step whatever it holds
FLAT = Roofline("flat", Accelerator(1e9, 1e12, 1e15, 1.0, 1.0), Model(0, 0, 1e-9, 5000, 0, 64))
NO_MASKS = ModuloGrammar(512)
LIMITS = Limits(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, depth=2)


def build() -> tuple[Scheduler, HashModel, MemoryTokens]:
    scheduler = Scheduler(LIMITS)
    tokens = MemoryTokens(LIMITS.slots, LIMITS.depth + 2, LIMITS.max_num_seqs)
    for number in range(3):
        scheduler.admit(request(number, [number + 1, 7, 9], 20))
    return scheduler, HashModel(SlotTables(LIMITS.slots, 16, LIMITS.block_size), tokens, LIMITS.num_blocks), tokens


def plan(scheduler: Scheduler) -> StepPlan:
    found = scheduler.plan()
    assert found is not None
    return found


def test_steps_launched_ahead_follow_without_a_gap_and_late_ones_leave_one() -> None:
    scheduler, model, _ = build()
    device = TimedSimDevice(model, NO_MASKS, FLAT, lambda: None)
    results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    for _ in range(3):
        device.launch(plan(scheduler), results.put)
    first, second, third = (results.get(timeout=10) for _ in range(3))
    for result in (first, second, third):
        assert result.ended - result.started == 5_000_000
        assert result.received <= result.launched <= result.started and result.ended <= result.reported
    assert second.started == first.ended and third.started == second.ended
    scheduler.commit(0, np.full(3, 1, np.int32))
    device.launch(plan(scheduler), results.put)
    late = results.get(timeout=10)
    assert late.started == late.launched > third.ended
    device.close()


def test_time_changes_no_token() -> None:
    runs = []
    for timed in (False, True):
        scheduler, model, tokens = build()
        device = TimedSimDevice(model, NO_MASKS, FLAT, lambda: None) if timed else SimDevice(model, NO_MASKS)
        results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        ids: list[list[int]] = []
        while (next_plan := scheduler.plan()) is not None or scheduler.in_flight:
            if next_plan is not None:
                device.launch(next_plan, results.put)
                continue
            result, record = results.get(timeout=10), scheduler.in_flight.records[0]
            out = tokens.read(result.step, record.rows)
            ids.append(out.tolist())
            scheduler.commit(result.step, out)
        device.close()
        runs.append(ids)
    assert runs[0] == runs[1] and len(runs[0]) == 20


def test_an_alarm_is_never_early_and_learns_how_late_sleeping_is() -> None:
    alarm = Alarm()
    errors = []
    for _ in range(50):
        when = time.monotonic_ns() + 1_000_000
        alarm.sleep_until(when)
        errors.append(time.monotonic_ns() - when)
    assert min(errors) >= 0
    print(f"woken {np.mean(errors) / 1e3:.1f} us late on average, the sleep itself {alarm.overshoot / 1e3:.0f} us")


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_of_a_launch_grows_with_its_length(kind: str) -> None:
    launch_work(kind, 0)()
    times = []
    for milliseconds in (1.0, 20.0):
        work = launch_work(kind, milliseconds)
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    assert times[0] < times[1] and times[1] > 0.005
