"""Log probabilities of tokens, by the model alone, in torch: of what was drawn and of what stood in a prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.batch import Batch, PromptRow
from runtime.slot_sampling import SampleBatch
from runtime.step import ID_DTYPE, Logprobs

Tensor = torch.Tensor
LEAST = -9999.0  # a log probability below is told as this: JSON knows no infinity
PIECE = 64  # positions of a prompt whose logits are held at once


class Raw:
    """The logits of the rows that want log probabilities, kept from before they are edited."""

    def __init__(self, logits: Tensor, how: SampleBatch) -> None:
        """float32[S, vocab]."""
        self.how = how
        self.rows = [row for row, _ in how.logprobs]
        self.logits = logits[self.rows] if self.rows else None

    def of(self, drawn: NDArray[np.int32]) -> list[Logprobs]:
        """Of what the rows drew, int32[S]."""
        if self.logits is None:
            return []
        how, found = self.how, []
        for at, (row, top) in enumerate(how.logprobs):
            told = _told(self.logits[at : at + 1], drawn[row : row + 1], top, int(how.vocab[row]))
            found.append(Logprobs(int(how.slots[row]), int(how.lengths[row]), top + 1, *told))
        return found


def of_prompts(
    batch: Batch, vocab: NDArray[np.int64], hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> list[Logprobs]:
    """Of the prompt rows; `hidden` [T, hidden_size] are the step's states, `head` turns some into float32 logits.

    `vocab` int64[slots] as in `SampleBatch`, by slot.
    """
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    found = []
    for prompt in batch.prompts:
        begin, slot = int(starts[prompt.row]), int(batch.slots[prompt.row])
        told = [
            _piece(prompt, at, hidden[begin + at :], head, int(vocab[slot]))
            for at in range(0, len(prompt.targets), PIECE)
        ]
        ids, values, ranks = (b"".join(parts) for parts in zip(*told, strict=True))
        found.append(Logprobs(slot, prompt.first, prompt.top + 1, ids, values, ranks))
    return found


def _piece(
    prompt: PromptRow, at: int, hidden: Tensor, head: Callable[[Tensor], Tensor], vocab: int
) -> tuple[bytes, ...]:
    targets = prompt.targets[at : at + PIECE]
    return _told(head(hidden[: len(targets)]), targets, prompt.top, vocab)


def _told(logits: Tensor, ids: NDArray[np.int32], top: int, vocab: int) -> tuple[bytes, bytes, bytes]:
    """(ids, values, ranks) as `Logprobs` has them, for float32[n, vocab] and int32[n]."""
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, torch.from_numpy(ids.astype(np.int64))[:, None])
    real = logits[:, : vocab or None]
    best, which = real.topk(min(top, real.shape[1]))
    ranks = (logits > own).sum(-1) + 1
    values = (torch.cat((own, best), -1) - total).clamp(min=LEAST)
    told = torch.cat((torch.from_numpy(ids.astype(np.int64))[:, None], which), -1)
    return (
        told.numpy().astype(ID_DTYPE).tobytes(),
        values.numpy().astype("<f4").tobytes(),
        ranks.numpy().astype(ID_DTYPE).tobytes(),
    )
