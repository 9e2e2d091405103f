"""What requests change in their logits before a token is drawn: masks, bans, biases, processors, penalties. In torch.

The order is vLLM's: mask and padding, allowed ids, bad words and early stop ids, `logit_bias`, processors, penalties;
temperature and the filters come after (`runtime.sampler`). A row whose bans would leave nothing to draw keeps what its
mask allows. Knows no random number and no slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.device.base import MaskSet
from runtime.slot_sampling import Edits, SampleBatch

Tensor = torch.Tensor
Processor = Callable[[NDArray[np.int32], list[int], Tensor], Tensor]  # (prompt ids, output ids, logits) → logits
log = logging.getLogger(__name__)


def edit(logits: Tensor, how: SampleBatch, masks: MaskSet | None, processors: Mapping[str, Processor]) -> None:
    """Change float32[S, vocab] in place as the rows' requests ask."""
    if masks is not None:
        _mask(logits, masks)
    _cut(logits, how.vocab)
    early = dict(how.banned)
    for row, edits in how.edits:
        if len(edits.allowed_ids):
            _allow(logits[row], torch.from_numpy(edits.allowed_ids))
        _ban(logits[row], [*early.pop(row, ()), *(edits.banned() if edits.sampling.bad_words else ())])
        if len(edits.bias_ids):
            logits[row].index_add_(0, torch.from_numpy(edits.bias_ids), torch.from_numpy(edits.biases))
        for name in edits.sampling.processors:
            _process(logits, row, edits, name, processors[name])
    for row, ids in early.items():
        _ban(logits[row], list(ids))
    penalise(logits, [(row, edits) for row, edits in how.edits if edits.sampling.penalised])


def _mask(logits: Tensor, masks: MaskSet) -> None:
    """Leave each masked row only the ids whose bit is set."""
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    rows, blocked = torch.from_numpy(masks.rows), torch.from_numpy(bits == 0)
    if len(rows) == len(logits):
        logits.masked_fill_(blocked, -torch.inf)  # the rows are ascending
    else:
        logits[rows] = logits[rows].masked_fill_(blocked, -torch.inf)


def _cut(logits: Tensor, vocab: NDArray[np.int64]) -> None:
    """Nothing is drawn from a head's padding."""
    for end in np.unique(vocab[vocab > 0]).tolist():
        if end < logits.shape[1]:
            logits[torch.from_numpy(vocab == end), end:] = -torch.inf


def _allow(row: Tensor, ids: Tensor) -> None:
    kept = row[ids]
    row.fill_(-torch.inf)
    row[ids] = kept


def _ban(row: Tensor, ids: list[int]) -> None:
    """Unless nothing would be left."""
    if not ids:
        return
    kept = row[ids]
    row[ids] = -torch.inf
    if row.amax() == -torch.inf:
        row[ids] = kept


def _process(logits: Tensor, row: int, edits: Edits, name: str, processor: Processor) -> None:
    """What the processor returns, unless there is nothing in it to draw from; a fault of its own is logged."""
    assert edits.history is not None
    try:
        changed = processor(edits.history.prompt, edits.history.output, logits[row].clone())
        if changed.shape != logits[row].shape or not (changed < torch.inf).all() or not changed.isfinite().any():
            raise ValueError("it returned no logits that a token could be drawn from")
        logits[row] = changed
    except Exception:  # whatever a user's code may raise
        log.exception("logits processor %s was left out of a step", name)


def penalise(logits: Tensor, rows: list[tuple[int, Edits]]) -> None:
    """Repetition, frequency and presence penalties, touching only ids that have occurred.

    Repetition (Keskar et al. 2019) counts prompt and output, the other two (OpenAI) the output alone.
    """
    if not rows:
        return
    parts = [(row, edits.history.ids, edits.history.counts, edits.sampling) for row, edits in rows if edits.history]
    owner = np.repeat(np.arange(len(parts)), [len(ids) for _, ids, _, _ in parts])
    at = np.array([row for row, *_ in parts], np.int64)[owner]
    ids, counts = np.concatenate([ids for _, ids, _, _ in parts]), np.concatenate([counts for _, _, counts, _ in parts])
    wishes = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for *_, one in parts]
    repetition, frequency, presence = np.array(wishes, np.float32)[owner].T
    flat, at = logits.view(-1).numpy(), at * logits.shape[1] + ids
    values = flat.take(at)
    if (repetition != 1).any():
        values = np.where(values > 0, values / repetition, values * repetition)
    flat[at] = values - frequency * counts - presence * (counts > 0)
