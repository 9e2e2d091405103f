"""The sampler against plain numpy, and its draws against the distribution they should follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import SampleBatch
from runtime.sampler import sample
from runtime.sampling import uniform


def how(rows: int, **fields: Any) -> SampleBatch:
    wishes = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields
    numbers = uniform(np.arange(rows, dtype=np.uint64), np.full(rows, 9))
    full = [np.full(rows, wishes[name]) for name in ("temperature", "top_k", "top_p", "min_p")]
    return SampleBatch(full[0], full[1].astype(np.int64), full[2], full[3], numbers, [])


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that is asked for, written down plainly."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    total, kept = 0.0, []
    for token in order:
        if total >= top_p:
            break
        kept.append(token)
        total += weights[token]
    mask = np.zeros(len(weights), bool)
    mask[kept] = True
    weights[~mask | (weights < min_p * weights.max())] = 0
    return weights / weights.sum()


FIELDS = ("temperature", "top_k", "top_p", "min_p", "uniform")
CASES = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 8, 0.9, 0.05)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), CASES)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 24).astype(np.float32)
    expected = allowed(logits.astype(float), temperature, top_k, top_p, min_p)
    rows = 20_000
    wishes = how(rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = sample(torch.from_numpy(logits).repeat(rows, 1), wishes)
    counts = np.bincount(drawn, minlength=24)
    assert not counts[expected == 0].any()
    likely = expected * rows > 5
    distance = ((counts - expected * rows)[likely] ** 2 / (expected * rows)[likely]).sum()
    assert distance < 60  # chi-square, at most 23 degrees of freedom, p < 1e-4


def test_greedy_and_banned_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0]])
    wishes = how(2, temperature=0.0)
    banned = SampleBatch(wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, wishes.uniform, [(1, (1,))])
    assert sample(logits, banned).tolist() == [1, 2]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (16, 50)).astype(np.float32))
    wishes = how(16, top_k=10, top_p=0.9)
    together = sample(logits.clone(), wishes)
    for row in range(16):
        one = SampleBatch(*(getattr(wishes, name)[row : row + 1] for name in FIELDS), [])
        assert sample(logits[row : row + 1].clone(), one)[0] == together[row]
