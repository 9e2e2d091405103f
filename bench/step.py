"""`sidestep bench step`: what one step costs the scheduler alone (plan, encode, commit), no processes, no device.

Decode rows only, at each of `--rows`; prints a table and ends in one JSON line per row count. Means over `--steps`, so
that the steps in which rows take a new page count.
"""

from __future__ import annotations

import gc
import json
import statistics
import time

import msgspec
import numpy as np

from runtime.limits import Limits
from runtime.request import NO_IDS, Request
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler

COLUMNS = ("rows", "plan_us", "encode_us", "commit_us", "total_us", "per_row_us", "plan_bytes")


def decoding_scheduler(rows: int, steps: int) -> Scheduler:
    """A scheduler whose `rows` requests have all been prefilled."""
    length = 64 + steps
    scheduler = Scheduler(Limits(1 + rows * (length // 16 + 2), 16, length + 16, rows, max(4096, rows * 16)))
    for number in range(rows):
        prompt = np.arange(number, number + 16, dtype=np.int32)
        scheduler.admit(Request(number, prompt, Sampling(stop_ids=(-2,)), length, NO_IDS))
    while scheduler.num_waiting:
        answer(scheduler)
    return scheduler


def answer(scheduler: Scheduler) -> None:
    scheduler.plan()
    record = scheduler.records[0]
    scheduler.commit(record.step, np.full(len(record.rows), 7, np.int32))


def measure(rows: int, steps: int) -> dict[str, float]:
    scheduler = decoding_scheduler(rows, steps)
    encoder = msgspec.msgpack.Encoder()
    times: list[tuple[float, float, float]] = []
    sizes = []
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        sizes.append(len(encoder.encode(plan)))
        encoded = time.perf_counter()
        record = scheduler.records[0]
        ids = np.full(len(record.rows), 7, np.int32)
        ready = time.perf_counter()
        scheduler.commit(record.step, ids)
        times.append((planned - began, encoded - planned, time.perf_counter() - ready))
    plan_us, encode_us, commit_us = (statistics.fmean(column) * 1e6 for column in zip(*times, strict=True))
    total = plan_us + encode_us + commit_us
    figures = (rows, plan_us, encode_us, commit_us, total, total / rows, statistics.fmean(sizes))
    return dict(zip(COLUMNS, (round(figure, 2) for figure in figures), strict=True))


def run(rows: list[int], steps: int, only_json: bool) -> int:
    gc.disable()
    results = [measure(count, steps) for count in rows]
    if not only_json:
        print(" ".join(f"{name:>11}" for name in COLUMNS))
        for result in results:
            print(" ".join(f"{result[name]:>11}" for name in COLUMNS))
    for result in results:
        print(json.dumps(result))
    return 0
