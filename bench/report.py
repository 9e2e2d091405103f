"""The report of a serving benchmark in the field's layout and words, and the same figures for one JSON line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sample:
    """What was measured; times in seconds, one per finished request (itl: one per gap between tokens)."""

    backend: str
    duration: float
    completed: int
    input_tokens: int
    output_tokens: int
    retokenized: int | None
    device_busy: float  # seconds; not-a-number where the server does not tell
    device_idle: float  # seconds, while it had work
    e2e: list[float]
    ttft: list[float]
    tpot: list[float]
    itl: list[float]


SECTIONS = {
    "e2e_latency": "End-to-End Latency",
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}
SHORT = {"e2e_latency": "E2E Latency", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}


def summary(sample: Sample, given: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "backend": sample.backend,
        "request_rate": "inf" if given.request_rate == float("inf") else given.request_rate,
        "max_concurrency": given.max_concurrency,
        "completed": sample.completed,
        "failed": given.num_prompts - sample.completed,
        "duration": sample.duration,
        "total_input_tokens": sample.input_tokens,
        "total_output_tokens": sample.output_tokens,
        "total_output_tokens_retokenized": sample.retokenized,
        "request_throughput": sample.completed / sample.duration,
        "input_throughput": sample.input_tokens / sample.duration,
        "output_throughput": sample.output_tokens / sample.duration,
        "device_busy_s": sample.device_busy,
        "idle_with_work_fraction": sample.device_idle / max(sample.device_busy + sample.device_idle, 1e-9),
    }
    for key, times in zip(SECTIONS, (sample.e2e, sample.ttft, sample.tpot, sample.itl), strict=True):
        values = np.array(times or [float("nan")]) * 1000
        figures[f"mean_{key}_ms"] = float(values.mean())
        figures[f"median_{key}_ms"] = float(np.median(values))
        figures[f"p99_{key}_ms"] = float(np.percentile(values, 99))
    return {name: None if value != value else value for name, value in figures.items()}


def print_report(figures: dict[str, Any]) -> None:
    print(f"{' Serving Benchmark Result ':=^50}")
    for words, value in (
        ("Backend:", figures["backend"]),
        ("Traffic request rate:", figures["request_rate"]),
        ("Successful requests:", figures["completed"]),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Total generated tokens (retokenized):", figures["total_output_tokens_retokenized"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Input token throughput (tok/s):", figures["input_throughput"]),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
    ):
        _row(words, value)
    for key, title in SECTIONS.items():
        print(f"{title:-^50}")
        for kind in ("mean", "median", "p99"):
            _row(f"{kind.capitalize()} {SHORT[key]} (ms):", figures[f"{kind}_{key}_ms"])
    if figures["device_busy_s"] is not None:
        print(f"{'Device':-^50}")
        _row("Busy (s):", figures["device_busy_s"])
        _row("Idle with work (%):", 100 * figures["idle_with_work_fraction"])
    print("=" * 50)


def _row(words: str, value: Any) -> None:
    shown = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else value
    print(f"{words:<40} {shown:<10}")
