"""`sidestep bench step`: what one step costs the scheduler alone (plan, encode, commit), no processes, no device.

`decode`: every row decodes. `mixed`: a quarter of the rows are prompts of 64 tokens admitted in that step and three
quarters decode; each request has four output tokens, so a quarter of the rows end in each step too. Prints a table and
one JSON line per row count, the mixed figures under `mixed`. Means over `--steps`, so that the steps in which rows take
a new page count.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from itertools import count

import msgspec
import numpy as np

from runtime.limits import Limits
from runtime.request import NO_IDS, Request
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler

COLUMNS = ("rows", "plan_us", "commit_us", "encode_us", "total_us", "per_row_us", "plan_bytes")
Turn = Callable[[], None]  # what arrives before a step


def decoding(rows: int, steps: int) -> tuple[Scheduler, Turn]:
    """A scheduler whose `rows` requests have all been prefilled; nothing else arrives."""
    length = 64 + steps
    scheduler = Scheduler(Limits(1 + rows * (length // 16 + 2), 16, length + 16, rows, max(4096, rows * 16)))
    for number in range(rows):
        prompt = np.arange(number, number + 16, dtype=np.int32)
        scheduler.admit(Request(number, prompt, Sampling(stop_ids=(-2,)), length, NO_IDS))
    while scheduler.num_waiting:
        answer(scheduler)
    return scheduler, lambda: None


def mixed(rows: int, steps: int) -> tuple[Scheduler, Turn]:
    """A scheduler in which a quarter of the rows begin at each step and a quarter end."""
    scheduler = Scheduler(Limits(1 + rows * 16, 16, 128, rows, rows * 64))
    numbers = count()

    def arrive() -> None:
        for _ in range(max(1, rows // 4)):
            number = next(numbers)
            prompt = np.arange(number, number + 64, dtype=np.int32)
            scheduler.admit(Request(number, prompt, Sampling(stop_ids=(-2,)), 4, NO_IDS))

    for _ in range(8):
        arrive()
        answer(scheduler)
    return scheduler, arrive


def answer(scheduler: Scheduler) -> None:
    scheduler.plan()
    record = scheduler.in_flight.records[0]
    scheduler.commit(record.step, np.full(len(record.rows), 7, np.int32))


def measure(rows: int, mix: str, steps: int) -> dict[str, float]:
    scheduler, arrive = (decoding if mix == "decode" else mixed)(rows, steps)
    encoder = msgspec.msgpack.Encoder()
    times: list[tuple[float, float, float]] = []
    sizes = []
    for _ in range(steps):
        arrive()
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        sizes.append(len(encoder.encode(plan)))
        encoded = time.perf_counter()
        record = scheduler.in_flight.records[0]
        ids = np.full(len(record.rows), 7, np.int32)
        ready = time.perf_counter()
        scheduler.commit(record.step, ids)
        times.append((planned - began, time.perf_counter() - ready, encoded - planned))
    costs = [statistics.fmean(column) * 1e6 for column in zip(*times, strict=True)]
    figures = [*costs, sum(costs), sum(costs) / rows, statistics.fmean(sizes)]
    return dict(zip(COLUMNS, (rows, *(round(figure, 2) for figure in figures)), strict=True))


def main(given: argparse.Namespace) -> int:
    gc.disable()
    results = {mix: [measure(number, mix, given.steps) for number in given.rows] for mix in ("decode", "mixed")}
    if not given.json:
        print(" ".join(f"{name:>11}" for name in ("mix", *COLUMNS)))
        for mix, lines in results.items():
            for line in lines:
                print(" ".join(f"{cell:>11}" for cell in (mix, *line.values())))
    for decode, mixed_too in zip(results["decode"], results["mixed"], strict=True):
        print(json.dumps(decode | {"mixed": mixed_too}))
    return 0
