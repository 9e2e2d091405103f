"""Steps that belong to nobody, run before a device is ready: kernels are chosen, built and measured then.

Their tokens stand on page 0, which is scratch.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from runtime.attention.flashinfer import PagedAttention
from runtime.batch import Batch, SlotTables
from runtime.device.put import Put
from runtime.model.llama import Llama
from runtime.step import ID_DTYPE, SLOT_DTYPE, StepPlan


def scratch_batches(block_size: int) -> list[Batch]:
    """One of chunk rows, one of decode rows, one of both; three rows each."""
    kinds: list[tuple[list[int], list[int]]] = [([], [1, 2, 3]), ([1, 2, 3], []), ([1], [2, 3])]
    tables = SlotTables(4, len(kinds), block_size)
    tables.num_pages[:] = len(kinds)
    return [tables.apply(_plan(step, decode, chunks)) for step, (decode, chunks) in enumerate(kinds)]


def _plan(step: int, decode: list[int], chunks: list[int]) -> StepPlan:
    """Each row computes one token, whose id is 0."""
    ones = np.ones(len(chunks), ID_DTYPE)
    rows, others = (np.array(slots, SLOT_DTYPE).tobytes() for slots in (decode, chunks))
    return StepPlan(0, step, rows, others, ones.tobytes(), bytes([1] * len(chunks)), (0 * ones).tobytes())


def warm_up(model: Llama, attention: PagedAttention, put: Put) -> None:
    """Run one step of each kind."""
    for batch in scratch_batches(attention.cache.block_size):
        ids, positions, reach = (put(part.astype(np.int64)) for part in (batch.input_ids, batch.positions, batch.reach))
        model.logits(model.forward(ids, positions, reach, attention.plan(batch, put)))


def largest_step(model: Llama, tokens: int, put: Put) -> Tensor:
    """The states of as many tokens as a step may have; without pages, but with all that attention gives."""
    ids = put(np.zeros(tokens, np.int64))
    return model.forward(ids, ids, ids + 1, lambda layer, queries, keys, values: queries.contiguous())
