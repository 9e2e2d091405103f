"""Tokens from logits in torch: greedy, temperature, top_k, top_p and min_p.

One uniform number per row and the inverse of the cumulative distribution: the same number draws the same token
whatever else is in the batch. Knows no request and no seed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.batch import SampleBatch

Tensor = torch.Tensor


def sample(logits: Tensor, how: SampleBatch) -> NDArray[np.int32]:
    """float32[S, vocab] to int32[S]; `logits` may be overwritten.

    Filters apply in vLLM's order after the temperature: top_k, top_p, min_p. The most probable token always stays.
    """
    for row, ids in how.banned:
        logits[row, list(ids)] = -torch.inf
    drawn = logits.argmax(-1).numpy().astype(np.int32)
    for row in np.flatnonzero(how.temperature > 0).tolist():
        drawn[row] = _draw(logits[row], how, row)
    return drawn


def _draw(logits: Tensor, how: SampleBatch, row: int) -> int:
    """One row's token. Only a row with a filter pays for the order of its candidates."""
    top_k, top_p, min_p = int(how.top_k[row]), float(how.top_p[row]), float(how.min_p[row])
    filtered = bool(top_k) or top_p < 1 or min_p > 0
    values, ids = logits.topk(min(top_k or len(logits), len(logits))) if filtered else (logits, None)
    weights = ((values - values.max()).double() / float(how.temperature[row])).exp()
    if filtered:
        before = weights.cumsum(0) - weights
        weights = weights * ((before < top_p * weights.sum()) & (weights >= min_p))  # the first weighs 1 and stays
    cumulative = weights.cumsum(0)
    at = int(torch.searchsorted(cumulative, float(how.uniform[row]) * cumulative[-1], right=True))
    at = min(at, int(weights.nonzero()[-1]))  # rounding may point past the last candidate
    return at if ids is None else int(ids[at])
