"""Log probabilities of tokens, by the model alone: of what was drawn and of what stood in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.batch import Batch, PromptRow
from runtime.sampling_ops import SamplingOps
from runtime.slot_sampling import SampleBatch
from runtime.step import ID_DTYPE, Logprobs

Tensor = torch.Tensor
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
PIECE = 64  # positions of a prompt whose logits are held at once


class Raw:
    """The logits of the rows that want log probabilities, kept from before they are edited."""

    def __init__(self, logits: Tensor, how: SampleBatch) -> None:
        """float32[S, vocab]."""
        self.how = how
        self.rows = [row for row, _ in how.logprobs]
        self.logits = logits[self.rows] if self.rows else None

    def of(self, drawn: I32, ops: SamplingOps) -> list[Logprobs]:
        """Of what the rows drew, int32[S]."""
        if self.logits is None:
            return []
        return of_drawn(self.how, *ops.told(self.logits, drawn[self.rows], *widest(self.how)))


def widest(how: SampleBatch) -> tuple[int, int]:
    """(how many likeliest ids the most curious row wants, of how many ids; 0: of all), of rows that want any."""
    limits = how.vocab[[row for row, _ in how.logprobs]]
    return max(top for _, top in how.logprobs), int(limits.max()) if limits.all() else 0


def of_drawn(how: SampleBatch, ids: I32, values: F32, ranks: I32) -> list[Logprobs]:
    """What `SamplingOps.told` found for the rows that want log probabilities."""
    return [
        _packed(int(how.slots[row]), int(how.lengths[row]), top, ids[at, None], values[at, None], ranks[at, None])
        for at, (row, top) in enumerate(how.logprobs)
    ]


def of_prompts(
    batch: Batch, vocab: NDArray[np.int64], hidden: Tensor, head: Callable[[Tensor], Tensor], ops: SamplingOps
) -> list[Logprobs]:
    """Of the prompt rows; `hidden` [T, hidden_size] are the step's states, `head` turns some into float32 logits.

    `vocab` int64[slots] as in `SampleBatch`, by slot.
    """
    found: list[Logprobs] = []
    for prompt, slot, first in prompts(batch):
        parts = [
            ops.told(head(hidden[first + at.start : first + at.stop]), prompt.targets[at], prompt.top, int(vocab[slot]))
            for at in pieces(prompt)
        ]
        found += of_prompt(prompt, slot, *(np.concatenate(one) for one in zip(*parts, strict=True)))
    return found


def prompts(batch: Batch) -> Iterator[tuple[PromptRow, int, int]]:
    """Those told about, with their slot and the index of their first token among the T."""
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    for prompt in batch.prompts:
        yield prompt, int(batch.slots[prompt.row]), int(starts[prompt.row])


def pieces(prompt: PromptRow) -> Iterator[slice]:
    """Of its targets, in order."""
    for at in range(0, len(prompt.targets), PIECE):
        yield slice(at, min(at + PIECE, len(prompt.targets)))


def of_prompt(prompt: PromptRow, slot: int, ids: I32, values: F32, ranks: I32) -> list[Logprobs]:
    """What `SamplingOps.told` found for its targets."""
    return [_packed(slot, prompt.first, prompt.top, ids, values, ranks)]


def _packed(slot: int, first: int, top: int, ids: I32, values: F32, ranks: I32) -> Logprobs:
    """The first `top` of what is told of each token."""
    width = min(top + 1, ids.shape[1])
    told = ids[:, :width].astype(ID_DTYPE).tobytes(), values[:, :width].astype("<f4").tobytes()
    return Logprobs(slot, first, width, *told, ranks.astype(ID_DTYPE).tobytes())
