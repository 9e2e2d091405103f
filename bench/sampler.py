"""`sidestep bench sampler`: what drawing costs on the CPU, by what is asked for, on logits of a model's size.

Each case on the same random logits (normal, spread 3, a few ids well ahead as a model has them), the C kernels and
their torch reference by turns, the medians of `--repeats`; the copy of the logits that each run needs is not counted.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from proc.settings import UsageError
from runtime.device.base import MaskSet
from runtime.kernels.library import kernels
from runtime.kernels.sampling import KernelOps
from runtime.logprobs import Raw
from runtime.sampler import sample
from runtime.sampling import Sampling
from runtime.sampling_on_torch import TorchOps
from runtime.sampling_ops import SamplingOps
from runtime.slot_sampling import SampleBatch, SlotSampling

Work = Callable[[torch.Tensor, SamplingOps], None]
Figures = dict[str, float]  # ms by path
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy, penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "greedy, bias, bad words": {"logit_bias": ((5, 2.0), (9, -3.0)), "bad_words": ((1, 2), (3,))},
    "greedy, masks": {"constrained": True},
    "greedy, 5 logprobs": {"logprobs": 5},
}


def main(given: argparse.Namespace) -> int:
    if given.vocab_size < 64:
        raise UsageError("--vocab-size must be at least 64, which the cases need")
    try:
        found, torch_ops = kernels(), TorchOps()
    except ValueError as error:
        raise UsageError(str(error)) from None
    paths: dict[str, SamplingOps] = {"torch": torch_ops}
    if found is not None:
        paths = {found.name: KernelOps(found, torch.get_num_threads()), "torch": torch_ops}
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 3, (given.rows, given.vocab_size)).astype(np.float32)
    logits[np.arange(given.rows)[:, None], draw.integers(0, given.vocab_size, (given.rows, 20))] += 8
    figures = {
        name: _measure(given, torch.from_numpy(logits), _whole(given, wishes, draw), paths)
        for name, wishes in CASES.items()
    }
    alone = _batch(given, CASES["greedy, penalties"], draw)
    figures["penalties alone"] = _measure(given, torch.from_numpy(logits), partial(_penalties, alone), paths)
    if not given.json:
        print(f"{given.rows} rows, {given.vocab_size} ids, {torch.get_num_threads()} threads; ms")
        print(" " * 28 + "".join(f"{path:>10}" for path in paths))
        for name, costs in figures.items():
            print(f"{name:<28}" + "".join(f"{cost:>10.2f}" for cost in costs.values()))
    ms = {path: {name: costs[path] for name, costs in figures.items()} for path in paths}
    print(json.dumps({"rows": given.rows, "vocab_size": given.vocab_size, "ms": ms[next(iter(paths))], "paths": ms}))
    return 0


def _measure(given: argparse.Namespace, logits: torch.Tensor, work: Work, paths: dict[str, SamplingOps]) -> Figures:
    times: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(given.repeats):
        for path, ops in paths.items():
            fresh = logits.clone()
            began = time.perf_counter()
            work(fresh, ops)
            times[path].append(time.perf_counter() - began)
    return {path: round(statistics.median(taken) * 1e3, 3) for path, taken in times.items()}


def _whole(given: argparse.Namespace, wishes: dict[str, Any], draw: np.random.Generator) -> Work:
    """All that a step's sampling does."""
    how = _batch(given, wishes, draw)
    bits = draw.integers(0, 2**32, (given.rows, -(-given.vocab_size // 32)), np.uint32)
    masks = MaskSet(np.arange(given.rows), bits, 0, 0, 0) if wishes.get("constrained") else None

    def work(logits: torch.Tensor, ops: SamplingOps) -> None:
        raw = Raw(logits, how)
        raw.of(sample(logits, how, masks, {}, ops), ops)

    return work


def _penalties(how: SampleBatch, logits: torch.Tensor, ops: SamplingOps) -> None:
    ops.penalise(logits, how.edits)


def _batch(given: argparse.Namespace, wishes: dict[str, Any], draw: np.random.Generator) -> SampleBatch:
    """Half of the known ids are the prompt's."""
    slots = SlotSampling(given.rows)
    for slot in range(given.rows):
        ids = draw.integers(0, given.vocab_size, given.history).astype(np.int32)
        slots.admit(slot, Sampling(**wishes, seed=slot), given.history // 2, ids)
    return slots.batch(np.arange(given.rows, dtype=np.int32), np.full(given.rows, given.history))
