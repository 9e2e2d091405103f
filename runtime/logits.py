"""What requests change in their logits before a token is drawn: masks, bans, biases, processors, penalties.

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

from runtime.collective import Collective
from runtime.device.base import MaskSet
from runtime.sampling_ops import SamplingOps
from runtime.slot_sampling import Edits, SampleBatch

Tensor = torch.Tensor
F32 = NDArray[np.float32]
Processor = Callable[[NDArray[np.int32], list[int], Tensor], Tensor]  # (prompt ids, output ids, logits) → logits
PIECE = 1024  # first ids, which tell as a rule whether anything is left
log = logging.getLogger(__name__)


def edit(
    logits: Tensor, how: SampleBatch, masks: MaskSet | None, processors: Mapping[str, Processor], ops: SamplingOps
) -> None:
    """Change float32[S, vocab] in place as the rows' requests ask."""
    if masks is not None:
        ops.mask(logits, masks)
    _cut(logits, how.vocab)
    early, rows = dict(how.banned), logits.numpy()
    for row, edits in how.edits:
        if len(edits.allowed_ids):
            _allow(rows[row], edits.allowed_ids)
        _ban(rows[row], [*early.pop(row, ()), *(edits.banned() if edits.sampling.bad_words else ())])
        if len(edits.bias_ids):
            rows[row][edits.bias_ids] += edits.biases
        for name in edits.sampling.processors:
            process(logits, row, edits, name, processors[name])
    for row, ids in early.items():
        _ban(rows[row], list(ids))
    penalised = [(row, edits) for row, edits in how.edits if edits.sampling.penalised]
    if penalised:
        ops.penalise(logits, penalised)


def of_first_rank(processor: Processor, ranks: Collective) -> Processor:
    """`processor` as rank 0 runs it: the others take its logits, so that all draw the same whatever a user's code does.

    Where it fails, all leave it out.
    """

    def shared(prompt: NDArray[np.int32], output: list[int], logits: Tensor) -> Tensor:
        first = ranks.rank.index == 0
        given = torch.full_like(logits, torch.nan if first else 0.0)
        try:
            if first and (changed := processor(prompt, output, logits)).shape == logits.shape:
                given.copy_(changed)
        finally:
            given = ranks.sum(given)
        return given

    return shared


def _cut(logits: Tensor, vocab: NDArray[np.int64]) -> None:
    """Nothing is drawn from a head's padding."""
    for end in np.unique(vocab[vocab > 0]).tolist():
        if end < logits.shape[1]:
            logits[torch.from_numpy(vocab == end), end:] = -torch.inf


def _allow(row: F32, ids: NDArray[np.int64]) -> None:
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def _ban(row: F32, ids: list[int]) -> None:
    """Unless nothing would be left."""
    if not ids:
        return
    kept = row[ids]
    row[ids] = -np.inf
    if not ((row[:PIECE] > -np.inf).any() or (row > -np.inf).any()):
        row[ids] = kept


def process(logits: Tensor, row: int, edits: Edits, name: str, processor: Processor) -> None:
    """Make a row what the processor returns, unless nothing in it could be drawn; a fault of its own is logged."""
    assert edits.history is not None
    try:
        changed = processor(edits.history.prompt, edits.history.output, logits[row].clone())
        if changed.shape != logits[row].shape or not (changed < torch.inf).all() or not changed.isfinite().any():
            raise ValueError("it returned no logits that a token could be drawn from")
        logits[row] = changed
    except Exception:  # whatever a user's code may raise
        log.exception("logits processor %s was left out of a step", name)
