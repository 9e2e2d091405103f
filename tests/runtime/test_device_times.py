"""A device's clock, read through events that count in float32 milliseconds, against the host's."""

from __future__ import annotations

import random

import numpy as np

from runtime.device.device_times import DeviceTimes


class At:
    """An event at a time by the device's clock, ns."""

    def __init__(self, ns: float) -> None:
        self.ns = ns

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_ms(self, later: At) -> float:
        return float(np.float32((later.ns - self.ns) / 1e6))


def errors(drift: float, gap_ns: int, steps: int = 4000) -> list[int]:
    """ns by which each step's end is reckoned wrong, with a device whose clock is fast by `drift`."""
    draw = random.Random(1)
    now, found, last = 5_000_000_000, [], 0
    times = DeviceTimes(At(now * (1 + drift)), now + 30_000)
    for _ in range(steps):
        start = now + gap_ns
        now = start + draw.randint(1_000_000, 9_000_000)
        woken = now + draw.randint(25_000, 400_000)
        began, ended = times.step(At(start * (1 + drift)), At(now * (1 + drift)), woken)
        assert last <= began <= ended <= woken
        last = ended
        found.append(ended - now)
    return found


def test_half_a_minute_of_steps_is_right_to_some_microseconds() -> None:
    for drift in (0.0, 2e-5, -2e-5):
        for gap in (0, 50_000):
            assert max(map(abs, errors(drift, gap))) < 100_000
            assert max(map(abs, errors(drift, gap)[1000:])) < 60_000


def test_idleness_is_told_between_steps() -> None:
    times = DeviceTimes(At(0), 1_000_000)
    first = times.step(At(1e6), At(3e6), 5_000_000)
    second = times.step(At(4e6), At(6e6), 9_000_000)
    assert abs(second[0] - first[1] - 1_000_000) < 1000


def test_an_end_is_never_after_its_waking() -> None:
    times = DeviceTimes(At(0), 1_000_000)
    assert times.step(At(0), At(9e6), 2_000_000)[1] == 2_000_000
