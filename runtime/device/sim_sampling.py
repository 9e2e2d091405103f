"""How the simulated device draws: evenly among the ids a row may have, by its hash. Knows no cells and no torch.

Its logits are all equal, so temperature, top_k, top_p, min_p and mild biases have nothing to shape, and every id has
the log probability -ln(vocabulary). What a row must not draw is not drawn (masks, allowed ids, bad words, early stop
ids, a bias of -100 or below), and penalties mix the row's history into its hash, so that a history which is wrong
changes the answer.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.device.base import MaskSet
from runtime.history import History
from runtime.sampling import mix64
from runtime.slot_sampling import SampleBatch
from runtime.step import ID_DTYPE, Logprobs

U64 = NDArray[np.uint64]
I32 = NDArray[np.int32]
BANNED = -100.0  # a bias that leaves an id no chance
RUN = 32  # words whose bits are counted together


def draw(hashes: U64, how: SampleBatch, masks: MaskSet | None, vocab_size: int) -> I32:
    """int32[S] from the rows' hashes, uint64[S]."""
    noise = np.where(how.temperature > 0, (how.uniform * 2.0**53).astype(np.uint64) + np.uint64(1), 0)
    past = np.zeros(len(hashes), np.uint64)
    for row, edits in how.edits:
        if edits.sampling.penalised and edits.history is not None:
            past[row] = _fingerprint(edits.history)
    numbers = mix64(hashes ^ noise.astype(np.uint64) ^ past)
    vocab = np.where(how.vocab > 0, np.minimum(how.vocab, vocab_size), vocab_size)
    ids = (numbers % vocab.astype(np.uint64)).astype(np.int32)
    rows, words = _allowed(how, masks, vocab, vocab_size)
    if len(rows):
        ids[rows] = _pick(words, numbers[rows])
    how.drawn(ids)
    return ids


def logprobs(batch: Batch, ids: I32, vocab_size: int) -> list[Logprobs]:
    """Of prompts and of what was drawn, int32[S]."""
    how = batch.sample
    found = [_even(int(batch.slots[one.row]), one.first, one.targets, one.top, vocab_size) for one in batch.prompts]
    for row, top in how.logprobs:
        found.append(_even(int(how.slots[row]), int(how.lengths[row]), ids[row : row + 1], top, vocab_size))
    return found


def _fingerprint(history: History) -> np.uint64:
    counted = mix64(history.ids.astype(np.uint64)) * (history.counts.astype(np.uint64) + np.uint64(1))
    return np.uint64(np.sum(counted, dtype=np.uint64))


def _allowed(
    how: SampleBatch, masks: MaskSet | None, vocab: NDArray[np.int64], vocab_size: int
) -> tuple[NDArray[np.int64], U64]:
    """(rows that may not draw every id, a bit for each id they may draw: uint64[n, words])."""
    edited = [row for row, _ in how.edits]
    masked = [] if masks is None else masks.rows.tolist()
    rows = sorted({*edited, *masked, *(row for row, _ in how.banned)})
    words = np.zeros((len(rows), -(-vocab_size // 64)), np.uint64)
    if not rows:
        return np.zeros(0, np.int64), words
    at = {row: n for n, row in enumerate(rows)}
    limits = vocab[rows]
    for limit in set(limits.tolist()):
        words[limits == limit] = _ones(limit, words.shape[1])
    if masks is not None:
        bits = words.view("<u4")
        shared = min(bits.shape[1], masks.bits.shape[1])
        places = slice(None) if masked == rows else [at[row] for row in masked]
        bits[places, :shared] &= masks.bits[:, :shared]
        bits[places, shared:] = 0
    for row, edits in how.edits:
        if len(edits.allowed_ids):
            words[at[row]] &= _bits(edits.allowed_ids, words.shape[1])
        _without(words[at[row]], edits.bias_ids[edits.biases <= BANNED].tolist())
        _without(words[at[row]], edits.banned() if edits.sampling.bad_words else [])
    for row, ids in how.banned:
        _without(words[at[row]], list(ids))
    return np.array(rows, np.int64), words


def _ones(count: int, words: int) -> U64:
    whole = np.zeros(words, np.uint64)
    whole[: count // 64] = ~np.uint64(0)
    if count % 64:
        whole[count // 64] = (1 << count % 64) - 1
    return whole


def _bits(ids: NDArray[np.int64], words: int) -> U64:
    found = np.zeros(words, np.uint64)
    np.bitwise_or.at(found, ids // 64, np.uint64(1) << (ids % 64).astype(np.uint64))
    return found


def _without(words: U64, ids: list[int]) -> None:
    """Clear the bits, unless none would be left."""
    if not ids:
        return
    left = words & ~_bits(np.array(ids, np.int64), len(words))
    if left.any():
        words[:] = left


def _pick(words: U64, numbers: U64) -> I32:
    """For each row, one of its set bits; int32[n]."""
    rows = np.arange(len(words))
    counts = np.zeros((len(words), -(-words.shape[1] // RUN), RUN), np.uint8)
    np.bitwise_count(words, out=counts.reshape(len(words), -1)[:, : words.shape[1]])
    totals = np.add.reduce(counts, 2, dtype=np.int64)
    run, wanted = _place(totals, (numbers % totals.sum(1).astype(np.uint64)).astype(np.int64))
    within, wanted = _place(counts[rows, run], wanted)
    word = run * RUN + within
    bits = np.unpackbits(words[rows, word].astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    ids: I32 = (word * 64 + _place(bits, wanted)[0]).astype(np.int32)
    return ids


def _place(counts: NDArray[np.generic], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, [n, m], where the `wanted`-th of what is counted lies; how many of those there come before it."""
    ends = counts.cumsum(1, dtype=np.int64)
    at = (ends <= wanted[:, None]).sum(1)
    rows = np.arange(len(counts))
    return at, wanted - ends[rows, at] + counts[rows, at]


def _even(slot: int, first: int, ids: I32, top: int, vocab_size: int) -> Logprobs:
    told = np.concatenate((ids[:, None], np.tile(np.arange(top, dtype=np.int32), (len(ids), 1))), 1)
    values = np.full(told.shape, -math.log(vocab_size), "<f4")
    ranks = np.ones(len(ids), ID_DTYPE)
    return Logprobs(slot, first, top + 1, told.astype(ID_DTYPE).tobytes(), values.tobytes(), ranks.tobytes())
