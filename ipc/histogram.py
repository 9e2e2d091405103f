"""Counts of durations by bucket, as Prometheus wants them; they add up over processes. Knows no name and no label."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0]
MICROSECONDS = [0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]


class Histogram(msgspec.Struct):
    """`counts[i]` values are at most `bounds[i]` seconds and above the bound before; the last has no bound."""

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


def histogram(bounds: list[float]) -> Histogram:
    return Histogram(bounds, [0] * (len(bounds) + 1))


def total(parts: list[dict[str, Histogram]]) -> dict[str, Histogram]:
    """Histograms of the same names and bounds, added up."""
    whole: dict[str, Histogram] = {}
    for part in parts:
        for name, one in part.items():
            mine = whole.setdefault(name, histogram(one.bounds))
            mine.counts = [a + b for a, b in zip(mine.counts, one.counts, strict=True)]
            mine.sum += one.sum
    return whole
