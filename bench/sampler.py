"""`sidestep bench sampler`: what drawing costs on the CPU, by what is asked for, on logits of a model's size.

Each case on the same random logits (normal, spread 3, a few ids well ahead as a model has them), the medians of
`--repeats`; the copy of the logits that each run needs is not counted. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from runtime.device.base import MaskSet
from runtime.logits import penalise
from runtime.logprobs import Raw
from runtime.sampler import sample
from runtime.sampling import Sampling
from runtime.slot_sampling import SampleBatch, SlotSampling

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
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 3, (given.rows, given.vocab_size)).astype(np.float32)
    logits[np.arange(given.rows)[:, None], draw.integers(0, given.vocab_size, (given.rows, 20))] += 8
    figures: dict[str, float] = {}
    for name, wishes in CASES.items():
        figures[name] = _measure(given, torch.from_numpy(logits), wishes, draw)
    figures["penalties alone"] = _penalties(given, torch.from_numpy(logits), draw)
    if not given.json:
        print(f"{given.rows} rows, {given.vocab_size} ids, {torch.get_num_threads()} threads")
        for name, cost in figures.items():
            print(f"{name:<28}{cost:>8.2f} ms")
    print(json.dumps({"rows": given.rows, "vocab_size": given.vocab_size, "ms": figures}))
    return 0


def _measure(
    given: argparse.Namespace, logits: torch.Tensor, wishes: dict[str, Any], draw: np.random.Generator
) -> float:
    how = _batch(given, wishes, draw)
    bits = draw.integers(0, 2**32, (given.rows, -(-given.vocab_size // 32)), np.uint32)
    masks = MaskSet(np.arange(given.rows), bits, 0, 0, 0) if wishes.get("constrained") else None
    times = []
    for _ in range(given.repeats):
        fresh = logits.clone()
        began = time.perf_counter()
        raw = Raw(fresh, how)
        raw.of(sample(fresh, how, masks))
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 3)


def _penalties(given: argparse.Namespace, logits: torch.Tensor, draw: np.random.Generator) -> float:
    how = _batch(given, CASES["greedy, penalties"], draw)
    times = []
    for _ in range(given.repeats):
        fresh = logits.clone()
        began = time.perf_counter()
        penalise(fresh, how.edits)
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 3)


def _batch(given: argparse.Namespace, wishes: dict[str, Any], draw: np.random.Generator) -> SampleBatch:
    """Half of the known ids are the prompt's."""
    slots = SlotSampling(given.rows)
    for slot in range(given.rows):
        ids = draw.integers(0, given.vocab_size, given.history).astype(np.int32)
        slots.admit(slot, Sampling(**wishes, seed=slot), given.history // 2, ids)
    return slots.batch(np.arange(given.rows, dtype=np.int32), np.full(given.rows, given.history))
