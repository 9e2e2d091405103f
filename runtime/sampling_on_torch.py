"""Sampling in torch: the reference of the C kernels (`runtime.kernels.sampling`), and what runs without.

No row is sorted whose best ids decide. Knows no request and no seed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.device.base import MaskSet
from runtime.sampling_ops import LEAST
from runtime.slot_sampling import Edits, SampleBatch

Tensor = torch.Tensor
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
FEW = 64  # best ids that are looked at before a row's own cut-off is searched
SPARE = 8  # further ones, which show whether others tie with the last that stays
PART = 256  # ids whose weights are summed at once
OFF = torch.iinfo(torch.int64).max  # as top_k


class TorchOps:
    """`runtime.sampling_ops.SamplingOps`."""

    def mask(self, logits: Tensor, masks: MaskSet) -> None:
        bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        rows, blocked = torch.from_numpy(masks.rows), torch.from_numpy(bits == 0)
        if len(rows) == len(logits):
            logits.masked_fill_(blocked, -torch.inf)  # the rows are ascending
        else:
            logits[rows] = logits[rows].masked_fill_(blocked, -torch.inf)

    def penalise(self, logits: Tensor, rows: list[tuple[int, Edits]]) -> None:
        for row, edits in rows:
            history, wish = edits.history, edits.sampling
            assert history is not None
            ids, counts = torch.from_numpy(history.ids.astype(np.int64)), torch.from_numpy(history.counts)
            values = logits[row, ids]
            values = torch.where(values > 0, values / wish.repetition_penalty, values * wish.repetition_penalty)
            logits[row, ids] = values - wish.frequency_penalty * counts - wish.presence_penalty * (counts > 0)

    def draw(self, logits: Tensor, how: SampleBatch) -> I32:
        drawn = np.zeros(len(logits), np.int32)
        greedy, others = np.flatnonzero(how.temperature <= 0), np.flatnonzero(how.temperature > 0)
        if len(greedy):
            drawn[greedy] = best_ids(_rows(logits, greedy))
        if len(others):
            drawn[others] = _draw(_rows(logits, others), _wish(how, others)).numpy()
        return drawn

    def told(self, logits: Tensor, ids: I32, top: int, vocab: int) -> tuple[I32, F32, I32]:
        shown, values, ranks = likeliest(logits, torch.from_numpy(ids), top, vocab)
        return shown.numpy(), values.numpy(), ranks.numpy()


def best_ids(logits: Tensor) -> Tensor:
    """int64[n]: the id of each row's largest logit, the first of equals; what is no number is no candidate."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)


def likeliest(logits: Tensor, ids: Tensor, top: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """`SamplingOps.told` of int32[S], as tensors of the logits' device and without waiting for it."""
    own_ids = ids.long()[:, None]
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, own_ids)
    real = logits[:, : vocab or None]
    best, which = real.topk(min(top, real.shape[1]))
    ranks = (logits > own).sum(-1) + 1
    values = (torch.cat((own, best), -1) - total).clamp(min=LEAST)
    return torch.cat((own_ids, which), -1).int(), values, ranks.int()


def inverse_cdf(weights: Tensor, uniform: Tensor, sums: torch.dtype = torch.float32) -> Tensor:
    """int64[n]: where the cumulated float32[n, vocab] passes `uniform`, float64[n], of their sum, if that is a number.

    Weights are summed by the PART in `sums`. Does not wait for the weights' device.
    """
    part, rest = _inverse(_part_sums(weights, sums), uniform)
    at = part[:, None] * PART + torch.arange(PART, device=weights.device)
    inside = weights.gather(-1, at.clamp(max=weights.shape[1] - 1)).double() * (at < weights.shape[1])
    return part * PART + _inverse(inside, rest)[0]


def _rows(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]


@dataclass(frozen=True)
class _Wish:
    """Of n rows that are not greedy."""

    temperature: Tensor  # float32[n]
    top_k: Tensor  # int64[n]; OFF where it is off
    top_p: Tensor  # float64[n]
    min_p: Tensor  # float32[n]
    uniform: Tensor  # float64[n]

    def at(self, rows: Tensor) -> _Wish:
        return _Wish(*(getattr(self, field.name)[rows] for field in fields(self)))

    def weights(self, logits: Tensor, best: Tensor) -> Tensor:
        """Of each id against the best one's; 0 for those that min_p leaves out."""
        weights = (logits - best[:, None]).div_(self.temperature[:, None]).exp_()
        return weights.masked_fill_(weights < self.min_p[:, None], 0.0) if self.min_p.any() else weights


def _wish(how: SampleBatch, rows: NDArray[np.int64]) -> _Wish:
    top_k = np.where(how.top_k > 0, how.top_k, OFF)
    parts = (how.temperature.astype(np.float32), top_k, how.top_p, how.min_p.astype(np.float32), how.uniform)
    return _Wish(*(torch.from_numpy(part[rows]) for part in parts))


def _draw(logits: Tensor, wish: _Wish) -> Tensor:
    """int64[n]: first for the rows that their best ids decide, then for those that need all."""
    best = logits.amax(-1)
    drawn = torch.full((len(logits),), -1)
    wrong = ~best.isfinite()  # a model that overflowed; the row has no distribution
    drawn[wrong] = best_ids(logits[wrong])
    few = (~wrong & ((wish.top_k <= FEW) | ((wish.top_p < 1) & (wish.top_k == OFF)))).nonzero()[:, 0]
    if len(few):
        _by_best(logits[few], best[few], wish.at(few), few, drawn)
    rest = (drawn < 0).nonzero()[:, 0]
    if len(rest):
        drawn[rest] = _by_all(logits[rest], best[rest], wish.at(rest))
    return drawn


def _by_best(logits: Tensor, best: Tensor, wish: _Wish, rows: Tensor, drawn: Tensor) -> None:
    """Draw for those whose cut-off lies among their FEW best ids."""
    width = min(FEW + SPARE, logits.shape[1])
    values, ids = logits.topk(width)
    weights = wish.weights(values, best).double()
    limited = wish.top_k <= FEW
    kth = values.gather(-1, wish.top_k.clamp(max=width)[:, None] - 1)[:, 0]
    kth = torch.where(limited, kth, -torch.inf)
    weights *= values >= kth[:, None]
    total = weights.sum(-1)
    if not limited.all():  # top_p is a share of all that min_p leaves
        total[~limited] = _part_sums(wish.at(~limited).weights(logits[~limited], best[~limited])).sum(-1)
    stays = (weights > 0) & _within(weights, total, wish)
    cutoff = values.masked_fill(~stays, torch.inf).amin(-1)
    certain = (values[:, -1] < torch.where(limited, torch.minimum(cutoff, kth), cutoff)) | (width == logits.shape[1])
    certain |= values[:, -1] == -torch.inf  # all that may be drawn is among them
    weights *= values >= cutoff[:, None]
    ids, order = ids[certain].sort(-1)
    at = _inverse(weights[certain].gather(-1, order), wish.uniform[certain])[0]
    drawn[rows[certain]] = ids.gather(-1, at[:, None])[:, 0]


def _within(weights: Tensor, total: Tensor, wish: _Wish) -> Tensor:
    """bool: ids that top_p keeps, of weights in descending order: those before which less than its share stands."""
    share = torch.where(wish.top_p < 1, wish.top_p * total, torch.inf)
    return weights.cumsum(-1) - weights < share[:, None]


def _cutoff(logits: Tensor, best: Tensor, wish: _Wish) -> float:
    """The smallest logit of one row, float32[1, vocab], that top_k and top_p keep."""
    weights = wish.weights(logits, best)
    if int(wish.top_k) < logits.shape[1]:
        kth = np.partition(logits[0].numpy(), -int(wish.top_k))[-int(wish.top_k)]
        weights *= logits >= kth
    total = weights.sum(-1, dtype=torch.float64)
    needed = (
        float((1 - wish.top_p) * total) / logits.shape[1]
    )  # all lighter ids together are less than what top_p drops
    heavy = (weights > 0) & (weights >= needed)
    values = torch.from_numpy(np.sort(logits[heavy].numpy())[::-1].copy())[None]
    stays = _within(wish.weights(values, best).double(), total, wish)
    return float(values[stays].min())


def _by_all(logits: Tensor, best: Tensor, wish: _Wish) -> Tensor:
    """int64[n], from the weights of the whole vocabulary."""
    weights = wish.weights(logits, best)
    for row in ((wish.top_k < logits.shape[1]) | (wish.top_p < 1)).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        weights[row] *= logits[row] >= _cutoff(logits[one], best[one], wish.at(torch.tensor([row])))
    return inverse_cdf(weights, wish.uniform)


def _part_sums(weights: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """float64[n, parts]: the sums of PART weights each."""
    whole = weights.shape[1] // PART * PART
    sums: Tensor = weights[:, :whole].reshape(len(weights), -1, PART).sum(-1, dtype=dtype)
    if whole < weights.shape[1]:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, True, dtype=dtype)), -1)
    return sums.double()


def _inverse(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(int64[n]: where the cumulated float64[n, c] passes that share of their sum; how far within it, in [0, 1))."""
    cumulated = weights.cumsum(-1)
    target = uniform[:, None] * cumulated[:, -1:]
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1, keepdim=True)
    at = torch.minimum(torch.searchsorted(cumulated, target, right=True), last)  # rounding may point past the last
    weight = weights.gather(-1, at)
    within = (target - cumulated.gather(-1, at) + weight) / weight.clamp(min=torch.finfo(torch.float64).tiny)
    return at[:, 0], within.clamp(0, 1 - 2**-53)[:, 0]
