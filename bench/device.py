"""`sidestep bench device`: decode and prefill of a model's shape on this machine's device, through real processes.

Weights are made up. A decode step's floor is the time in which the device could read the weights and the step's keys
and values, at the rate at which it copies; the device's times are those of its own clock, step by step. Depths and
layouts of processes are servers of their own, one after the other; their tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.shapes import write
from ipc.client import Client
from ipc.sampling_params import SamplingParams
from proc.gpu import machine
from proc.llm import LLM
from runtime.model.config import ModelConfig, read_config
from runtime.model.shapes import expected_shapes

NAMES = ("procs", "depth", "rows", "step_ms", "floor_ms", "over_floor", "idle_fraction", "tokens_per_s", "seen_us")
PROMPT = 128  # tokens before the decode steps
COPIED = 1 << 30  # bytes


@dataclass(frozen=True)
class Decode:
    """Steps of `rows` decode rows; times in milliseconds."""

    procs: str
    depth: int
    rows: int
    step_ms: float  # median, on the device
    floor_ms: float
    over_floor: float
    idle_fraction: float  # of the device, between the steps
    tokens_per_s: float
    seen_us: float  # median, from the end of a step on the device until the scheduler has taken its ids


def bandwidth(device: str) -> float:
    """Bytes a second that the device moves while it copies, read and written; the best of some."""
    place = torch.device(device)
    count = COPIED if place.type == "cuda" else COPIED >> 4
    source, to = (torch.ones(count, dtype=torch.uint8, device=place) for _ in range(2))

    def synchronize() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize()

    best = float("inf")
    for _ in range(10):
        synchronize()
        began = time.perf_counter()
        to.copy_(source)
        synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * count / best


def read_bytes(config: ModelConfig, itemsize: int, rows: int, keys: int) -> float:
    """What a decode step cannot but read: all weights but the embedding's other rows, and the rows' KV."""
    weights = sum(_count(shape) for name, shape in expected_shapes(config).items() if _whole(name, config))
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * keys
    return float(itemsize * (weights + kv))


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Of one prompt: two for each weight of a layer and token, and causal attention; the head is for one token."""
    layers = sum(_count(shape) for name, shape in expected_shapes(config).items() if ".layers." in name)
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens * tokens
    return 2.0 * layers * tokens + attention + 2.0 * config.vocab_size * config.hidden_size


def _whole(name: str, config: ModelConfig) -> bool:
    return config.tied or name != "model.embed_tokens.weight"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class Steps:
    """The device's last steps, by column; times in nanoseconds."""

    def __init__(self, client: Client, after: int) -> None:
        track = next(track for track in client.trace() if track.role.startswith("scheduler"))
        rows = [row for row in track.rows if row[track.columns.index("step")] > after]
        self.columns = {name: [row[at] for row in rows] for at, name in enumerate(track.columns)}

    @property
    def last(self) -> int:
        return max(self.columns["step"], default=-1)

    def durations(self, rows: int) -> list[int]:
        """Of steps that sampled so many rows, as the one before did."""
        count, began, ended = (self.columns[name] for name in ("rows", "started", "ended"))
        return [ended[at] - began[at] for at in self._steady(count, rows)]

    def seen(self, rows: int) -> list[int]:
        """From the end of such a step until the scheduler has read and taken its ids."""
        count, ended, committed = (self.columns[name] for name in ("rows", "ended", "committed"))
        return [committed[at] - ended[at] for at in self._steady(count, rows)]

    def idle(self, rows: int) -> tuple[int, int]:
        """(nanoseconds idle before such steps, from the first one's start to the last one's end)."""
        count, began, ended = (self.columns[name] for name in ("rows", "started", "ended"))
        steady = self._steady(count, rows)
        idle = sum(began[at] - ended[at - 1] for at in steady[1:])
        return idle, ended[steady[-1]] - began[steady[0]]

    @staticmethod
    def _steady(count: list[int], rows: int) -> list[int]:
        return [at for at in range(1, len(count)) if count[at] == count[at - 1] == rows]


def used_mb(device: str) -> int:
    """Of the device's memory, by everybody on it."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def asked(llm: LLM, rows: int, prompt: int, tokens: int) -> list[list[int]]:
    """The answers of `rows` requests at once, whose prompts have nothing in common."""
    prompts = [[(row + 7 * at + at * at) % 256 for at in range(prompt)] for row in range(rows)]
    wish = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, wish, use_tqdm=False)]


def decode(
    llm: LLM, layout: tuple[str, int], rows: int, tokens: int, floor_ms: float, last: int
) -> tuple[Decode, list[list[int]], int]:
    answers = asked(llm, rows, PROMPT, tokens)
    steps = Steps(llm.client, last)
    step_ms = statistics.median(steps.durations(rows)) / 1e6
    idle, span = steps.idle(rows)
    rate = rows * len(steps.durations(rows)) / (span / 1e9)
    seen_us = statistics.median(steps.seen(rows)) / 1e3
    figures = Decode(*layout, rows, step_ms, floor_ms, step_ms / floor_ms, idle / span, rate, seen_us)
    return figures, answers, steps.last


def prefill(llm: LLM, config: ModelConfig, tokens: int, last: int) -> float:
    """TFLOP/s of the best of three prompts that are one step each."""
    best = 0.0
    for _ in range(3):
        asked(llm, 1, tokens, 1)
        steps = Steps(llm.client, last)
        took = (steps.columns["ended"][-1] - steps.columns["started"][-1]) / 1e9
        best, last = max(best, prefill_flops(config, tokens) / took / 1e12), steps.last
    return best


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures of one shape."""
    config, found, answers = read_config(folder), list[Decode](), dict[int, list[list[int]]]()
    report: dict[str, Any] = {"shape": given.shape, "device": given.device}
    itemsize = 4 if given.device == "cpu" else 2
    rate = bandwidth(given.device)
    layouts = [(procs, int(depth)) for procs, depth in (layout.split(":") for layout in given.layouts)]
    for procs, depth in layouts:
        with LLM(
            str(folder),
            load_format="dummy",
            device=given.device,
            procs=procs,
            overlap_depth=depth,
            token_table=given.token_table,
            disable_radix_cache=True,
            max_num_seqs=max(given.rows),
            max_num_batched_tokens=max(given.prefill, *given.rows),
            max_model_len=max(given.prefill, PROMPT + given.tokens) + 1,
        ) as llm:
            if not (given.json or found):  # the first server is up
                print(f"{given.shape} on {given.device}, which copies at {rate / 1e12:.2f} TB/s")
                print("".join(f"{name:>15}" for name in NAMES), flush=True)
            asked(llm, min(given.rows), PROMPT, 4)
            last = Steps(llm.client, -1).last
            for rows in given.rows:
                floor = read_bytes(config, itemsize, rows, PROMPT + given.tokens // 2) / rate * 1e3
                figures, mine, last = decode(llm, (procs, depth), rows, given.tokens, floor, last)
                found.append(figures)
                if not given.json:
                    print(row_of(asdict(figures)), flush=True)
                if answers.setdefault(rows, mine) != mine:
                    report.setdefault("tokens_differ", []).append([procs, depth, rows])
            if (procs, depth) == layouts[0]:
                report["prefill_tflops"] = prefill(llm, config, given.prefill, last)
                report["used_mb"] = used_mb(given.device)
    return report | {"bandwidth": rate, "decode": [asdict(one) for one in found]}


def row_of(figures: dict[str, Any]) -> str:
    cells = [figures[name] for name in NAMES]
    return "".join(f"{cell:>15.3f}" if isinstance(cell, float) else f"{cell:>15}" for cell in cells)


def main(given: argparse.Namespace) -> int:
    if given.device == "cuda":
        machine(0)
    with tempfile.TemporaryDirectory() as folder:
        write(given.shape, Path(folder))
        report = measure(given, Path(folder))
    if not given.json:
        print(f"prefill of {given.prefill} tokens at {report['prefill_tflops']:.1f} TFLOP/s")
    print(json.dumps(report))
    return 0
