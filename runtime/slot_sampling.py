"""How each slot's tokens are drawn, as the worker remembers it, and what a step's sampler is handed.

Numbers stand in arrays by slot. What only some requests ask for (penalties, biases, banned ids, processors) is one
`Edits` a request, so that a step whose rows ask for none of it pays nothing. Knows no logits and no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.history import History
from runtime.sampling import Sampling, uniform

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Edits:
    """What one request changes in its logits; made at admission. `history` is fed by the sampler."""

    sampling: Sampling
    bias_ids: I64
    biases: NDArray[np.float32]
    allowed_ids: I64  # empty: all
    history: History | None

    def banned(self) -> list[int]:
        """The ids that would complete a bad word now."""
        assert self.history is not None
        return [word[-1] for word in self.sampling.bad_words if self.history.ends_with(word[:-1])]


@dataclass(frozen=True)
class SampleBatch:
    """How the sampling rows of a step are drawn; S rows."""

    temperature: F64  # [S]; 0 is greedy
    top_k: I64  # [S]; 0 is off
    top_p: F64  # [S]
    min_p: F64  # [S]
    uniform: F64  # [S], in [0, 1)
    vocab: I64  # [S]; ids from this one on cannot be drawn; 0: all can
    lengths: I64  # [S], the position of the token to be drawn
    slots: I32  # [S]
    banned: list[tuple[int, tuple[int, ...]]]  # (row, ids it cannot draw): stop ids before min_tokens
    edits: list[tuple[int, Edits]]  # (row, what its request changes)
    logprobs: list[tuple[int, int]]  # (row, how many of the most likely ids are told beside its own)
    constrained: I64  # [C] rows that need a mask

    def drawn(self, ids: I32) -> None:
        """Let the histories know what the rows drew, int32[S]."""
        for row, edits in self.edits:
            if edits.history is not None:
                edits.history.append(int(ids[row]))


class SlotSampling:
    """One entry for each of `num_slots` slots; `admit` resets it."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.vocab = np.zeros(num_slots, np.int64)
        self.min_len = np.zeros(num_slots, np.int64)  # below this many tokens the stop ids are banned
        self.logprobs = np.full(num_slots, -1, np.int64)
        self.prompt_logprobs = np.full(num_slots, -1, np.int64)
        self.constrained = np.zeros(num_slots, bool)
        self.stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self.edits: list[Edits | None] = [None] * num_slots
        self.edited = np.zeros(num_slots, bool)

    def admit(self, slot: int, sampling: Sampling, num_prompt: int, ids: I32) -> None:
        """`ids`: all that is known where `sampling.needs_history`, else empty."""
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.vocab[slot] = sampling.vocab
        self.min_len[slot] = num_prompt + sampling.min_tokens
        self.logprobs[slot] = sampling.logprobs
        self.prompt_logprobs[slot] = sampling.prompt_logprobs
        self.constrained[slot] = sampling.constrained
        self.stop_ids[slot] = sampling.stop_ids
        self.edits[slot] = _edits(sampling, num_prompt, ids)
        self.edited[slot] = self.edits[slot] is not None

    def prompt(self, slot: int) -> I32:
        """The ids of a prompt whose log probabilities are told."""
        edits = self.edits[slot]
        assert edits is not None and edits.history is not None
        return edits.history.prompt

    def batch(self, slots: I32, lengths: I64) -> SampleBatch:
        """For rows of these slots, each with so many tokens known."""
        edited = [(row, self.edits[slots[row]]) for row in np.flatnonzero(self.edited[slots]).tolist()]
        early = np.flatnonzero(lengths < self.min_len[slots]).tolist()
        logprobs = self.logprobs[slots]
        return SampleBatch(
            self.temperature[slots],
            self.top_k[slots],
            self.top_p[slots],
            self.min_p[slots],
            uniform(self.seed[slots], lengths),
            self.vocab[slots],
            lengths,
            slots,
            [(row, self.stop_ids[slots[row]]) for row in early],
            [(row, edits) for row, edits in edited if edits is not None],
            [(row, int(logprobs[row])) for row in np.flatnonzero(logprobs >= 0).tolist()],
            np.flatnonzero(self.constrained[slots]),
        )


def _edits(sampling: Sampling, num_prompt: int, ids: I32) -> Edits | None:
    if not (sampling.needs_history or sampling.logit_bias or sampling.allowed_ids):
        return None
    return Edits(
        sampling,
        np.array([token for token, _ in sampling.logit_bias], np.int64),
        np.array([bias for _, bias in sampling.logit_bias], np.float32),
        np.array(sampling.allowed_ids, np.int64),
        History(ids, num_prompt) if sampling.needs_history else None,
    )
