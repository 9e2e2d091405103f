"""Busy, idle with work and idle without: each nanosecond between steps is counted once, and as one of them."""

from __future__ import annotations

import pytest

from proc.device_clock import COLUMNS, DeviceClock
from runtime.step import StepResult


def clock(now: int) -> DeviceClock:
    made = DeviceClock()
    made.last_ended = made.work_since = now
    return made


def step(made: DeviceClock, number: int, started: int, ended: int) -> None:
    made.sent(started - 3, started - 2)
    made.committed(StepResult(0, number, started - 1, started, started, ended, ended + 10), ended + 11, 2, 2, 0, 4)


def test_gaps_between_steps_count_as_idle_with_work() -> None:
    made = clock(100)
    step(made, 0, 150, 200)
    step(made, 1, 200, 260)
    step(made, 2, 275, 300)
    assert (made.busy, made.idle_with_work, made.idle_without_work) == (135, 65, 0)


def test_time_before_the_work_came_is_idle_without_work() -> None:
    made = clock(100)
    step(made, 0, 100, 200)
    made.work_since = 950
    step(made, 1, 1000, 1100)
    assert (made.busy, made.idle_with_work, made.idle_without_work) == (200, 50, 750)


def test_work_that_came_while_the_device_computed_counts_from_its_end() -> None:
    made = clock(100)
    step(made, 0, 100, 200)
    made.work_since = 180
    step(made, 1, 230, 300)
    assert (made.idle_with_work, made.idle_without_work) == (30, 0)


def test_every_step_is_remembered_with_its_times() -> None:
    made = clock(100)
    step(made, 7, 150, 200)
    made.delivered()
    row = dict(zip(COLUMNS, made.steps[-1], strict=True))
    assert row["step"] == 7 and row["started"] == 150 and row["idle_with_work"] == 50 and row["used_blocks"] == 4
    assert row["planned"] < row["sent"] < row["received"] < row["started"] < row["ended"] < row["reported"]
    assert row["committed"] <= row["delivered"]


def test_the_open_gap_counts_by_whether_there_is_work() -> None:
    made = DeviceClock()
    with_work, without = made.figures(True), made.figures(False)
    assert with_work["device_idle_with_work_s"] > 0 and without["device_idle_with_work_s"] == 0
    assert without["device_idle_without_work_s"] > 0
    made.sent(1, 2)  # a step is in flight: the device is not known to idle
    assert made.figures(True)["device_idle_with_work_s"] == pytest.approx(0)
    assert made.figures(True)["oldest_step_s"] > 0 == with_work["oldest_step_s"]
