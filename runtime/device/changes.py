"""What a step's requests change in their logits, as tensors: packed on the host once for as long as the same requests
stand in the same rows, applied on the device (`runtime.logits` is the reference, its order is kept by
`runtime.sampling_on_device`).

Nothing that is applied waits for the device or depends on a value in its shapes. Logits are contiguous
float32[S, vocab] and are changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device.base import MaskSet
from runtime.device.histories import Counts, Tails, Words
from runtime.device.put import Put, together
from runtime.slot_sampling import SampleBatch

Arrays = tuple[NDArray[Any], ...]
Tensors = tuple[Tensor, ...]  # () where no row asks for it; int64 but for `biases` and `strengths`


@dataclass(frozen=True)
class Changes:
    """n rows of a kind each, `rows` [n] among the S; `at` counts within them, cells are row * width + id."""

    allowed: Tensors  # rows [n], cells of at * vocab + id that stay
    banned: (
        Tensors  # rows [n]; for each of W words: at, last id, row of its tail; what stands before it [W, longest - 1]
    )
    biased: Tensors  # cells
    penalised: Tensors  # rows [n], rows of their counts [n]
    followed: Tensors  # rows [n], rows of their tails [n]
    told: Tensors  # rows that want log probabilities [n]
    biases: Tensors  # float32, one for each of `biased`
    strengths: Tensors  # float32[n, 1]: repetition, frequency and presence penalty of `penalised`

    def allow(self, logits: Tensor) -> None:
        rows, cells = self.allowed
        kept = torch.zeros((len(rows), logits.shape[1]), dtype=torch.bool, device=logits.device)
        kept.view(-1).index_fill_(0, cells, True)
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~kept, -torch.inf))

    def ban(self, logits: Tensor, tails: Tails) -> None:
        """Unless nothing would be left."""
        rows, at, last, tail, before = self.banned
        vocab = logits.shape[1]
        if before.shape[1]:
            last = last.masked_fill(tails.missing(tail, before), vocab)  # a column for what is not banned now
        hit = torch.zeros((len(rows), vocab + 1), dtype=torch.bool, device=logits.device)
        hit.view(-1).index_fill_(0, at * (vocab + 1) + last, True)
        old = logits.index_select(0, rows)
        new = old.masked_fill(hit[:, :vocab], -torch.inf)
        logits.index_copy_(0, rows, torch.where((new > -torch.inf).any(-1, keepdim=True), new, old))

    def bias(self, logits: Tensor) -> None:
        logits.view(-1).index_add_(0, self.biased[0], self.biases[0])

    def penalise(self, logits: Tensor, counts: Counts) -> None:
        (rows, which), (repetition, frequency, presence) = self.penalised, self.strengths
        counted = counts.rows.index_select(0, which)
        times, old = counted >> 1, logits.index_select(0, rows)
        new = torch.where(old > 0, old / repetition, old * repetition)
        new = new - frequency * times - presence * (times > 0)
        logits.index_copy_(0, rows, torch.where(counted > 0, new, old))

    def drawn(self, ids: Tensor, counts: Counts, tails: Tails) -> None:
        """Let the histories know what the rows drew, int64[S]."""
        if self.penalised:
            counts.told(self.penalised[1], ids.index_select(0, self.penalised[0]))
        if self.followed:
            tails.told(self.followed[1], ids.index_select(0, self.followed[0]))


def mask(logits: Tensor, masks: MaskSet, put: Put) -> None:
    """Leave each masked row only the ids whose bit is set; one transfer: a row's number stands before its bits."""
    table = put(np.concatenate((masks.rows.astype(np.int32)[:, None], masks.bits.view(np.int32)), 1))
    octets = table[:, 1:].contiguous().view(torch.uint8)
    bits = (octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    known = bits.view(len(table), -1)[:, : logits.shape[1]]
    blocked = torch.ones((len(table), logits.shape[1]), dtype=torch.bool, device=logits.device)
    blocked[:, : known.shape[1]] = known == 0
    if len(table) == len(logits):
        logits.masked_fill_(blocked, -torch.inf)  # the rows are ascending
    else:
        rows = table[:, 0].long()
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(blocked, -torch.inf))


def changes(how: SampleBatch, vocab: int, counts: Counts, tails: Tails, words: list[Words | None], put: Put) -> Changes:
    """Two transfers at most; `words` by slot. Ids must be of the vocabulary, but early stop ids need not."""
    ints: list[Arrays] = [
        _allowed(how, vocab),
        _banned(how, vocab, tails, words),
        _biased(how, vocab),
        _with_rows(how, counts.row),
        _with_rows(how, tails.row),
        (np.array([row for row, _ in how.logprobs], np.int64),) if how.logprobs else (),
    ]
    return Changes(*_put(put, ints), *_put(put, [_biases(how), _strengths(how)]))


def _put(put: Put, groups: list[Arrays]) -> list[Tensors]:
    """All groups in one transfer, none if all are empty."""
    if not any(groups):
        return [()] * len(groups)
    there = iter(together(put, list(chain(*groups))))
    return [tuple([next(there) for _ in group]) for group in groups]


def _allowed(how: SampleBatch, vocab: int) -> Arrays:
    rows = [(row, edits.allowed_ids) for row, edits in how.edits if len(edits.allowed_ids)]
    if not rows:
        return ()
    cells = [at * vocab + ids for at, (_, ids) in enumerate(rows)]
    return np.array([row for row, _ in rows], np.int64), np.concatenate(cells)


def _banned(how: SampleBatch, vocab: int, tails: Tails, words: list[Words | None]) -> Arrays:
    """An early stop id is a word of one."""
    found = []
    for row, stop in how.banned:
        ids = np.array([token for token in stop if 0 <= token < vocab], np.int64)
        found.append((row, 0, Words(ids, np.zeros((len(ids), 0), np.int64))))
    for row, edits in how.edits:
        own = words[slot := int(how.slots[row])] if edits.sampling.bad_words else None
        if own is not None:
            found.append((row, max(0, int(tails.row[slot])), own))
    found = [one for one in found if len(one[2].last)]
    if not found:
        return ()
    many = [len(own.last) for _, _, own in found]
    rows, at = np.unique(np.repeat([row for row, _, _ in found], many), return_inverse=True)
    width = max(own.before.shape[1] for _, _, own in found)
    before = [np.pad(own.before, ((0, 0), (width - own.before.shape[1], 0)), constant_values=-1) for _, _, own in found]
    last = np.concatenate([own.last for _, _, own in found])
    return rows, at, last, np.repeat([tail for _, tail, _ in found], many), np.concatenate(before)


def _biased(how: SampleBatch, vocab: int) -> Arrays:
    cells = [row * vocab + edits.bias_ids for row, edits in how.edits if len(edits.bias_ids)]
    return (np.concatenate(cells),) if cells else ()


def _biases(how: SampleBatch) -> Arrays:
    biases = [edits.biases for _, edits in how.edits if len(edits.bias_ids)]
    return (np.concatenate(biases),) if biases else ()


def _with_rows(how: SampleBatch, row_of: NDArray[np.int64]) -> Arrays:
    """Rows whose slots have a row in a pool, and these."""
    rows = np.flatnonzero(row_of[how.slots] >= 0)
    return (rows, row_of[how.slots[rows]]) if len(rows) else ()


def _strengths(how: SampleBatch) -> Arrays:
    wishes = [edits.sampling for _, edits in how.edits if edits.sampling.penalised]
    if not wishes:
        return ()
    table = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in wishes]
    return tuple(np.array(table, np.float32).T[:, :, None])
