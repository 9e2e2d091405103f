"""What the engine does to draw a token: a caller's wishes (`ipc.messages.SamplingParams`) resolved once, at admission.

Random numbers are a function of (seed, absolute position) and of nothing else, so that neighbours, chunking,
preemption, overlap depth and restarts cannot change them.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's sampling, resolved. Travels to the worker once, with the slot."""

    temperature: float = 0.0  # 0 is greedy; the filters below are then without effect
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # uint64
    min_tokens: int = 0  # `stop_ids` cannot be drawn before this many output tokens
    stop_ids: tuple[int, ...] = ()  # EOS (unless ignored) and the caller's stop ids
    vocab: int = 0  # ids from this one on are padding of the model's head and cannot be drawn; 0: all can
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()  # only these can be drawn; (): all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences that the output cannot contain
    logprobs: int = -1  # the most likely ids told beside each token drawn; -1: no log probabilities
    prompt_logprobs: int = -1  # the same for the prompt
    constrained: bool = False  # each of its draws comes with a mask (a plan's second half)
    processors: tuple[str, ...] = ()  # registered callables that change the logits, in this order

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """All known ids must be there to draw the next one."""
        return self.penalised or bool(self.bad_words or self.processors) or self.prompt_logprobs >= 0


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, from splitmix64 (Steele, Lea and Flood 2014) over (seed, position).

    Args: `seeds` uint64[rows]; `positions` int64[rows], the absolute index of the token to be drawn.
    """
    return (mix64(mix64(seeds) ^ positions.astype(np.uint64)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser over an array of uint64; wraps, as it should."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
