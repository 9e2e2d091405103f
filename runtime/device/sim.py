"""A modelled accelerator with hash KV: the engine's own test bed. Knows no torch, no weights and no text.

Each KV cell stores a hash of the previous cell, reached through the block table, and of the input id, read from `next`
or from the chunk. The token is a hash of the row's last cell (and of the row's random number unless greedy), so a stale
slot, a wrong page or a bad prefix hit changes the answer (`runtime.device.sim_sampling`). The chain
h' = A·h + B·(id + 1) mod 2**64 is linear, so a whole chunk is one cumulative sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch, SlotTables
from runtime.device.base import Masks, MaskSet, Tokens
from runtime.device.sim_sampling import draw, logprobs
from runtime.step import Logprobs, StepPlan, StepResult

U64 = NDArray[np.uint64]
A = 0x9E3779B97F4A7C15
B = 0xC2B2AE3D27D4EB4F
A_INVERSE = pow(A, -1, 2**64)


def powers(base: int, count: int) -> U64:
    """base**0 .. base**(count - 1) mod 2**64, uint64[count]."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


class HashModel:
    """`num_blocks` pages of `block_size` cells; page 0 is scratch."""

    def __init__(self, tables: SlotTables, tokens: Tokens, num_blocks: int, vocab_size: int = 512) -> None:
        self.tables, self.tokens, self.vocab_size = tables, tokens, vocab_size
        self.num_blocks = num_blocks
        self.cells = np.zeros(num_blocks * tables.block_size, np.uint64)

    def prepare(self, plan: StepPlan) -> Batch:
        """Unfold a plan; its ids are poisoned until they are published."""
        batch = self.tables.apply(plan)
        self.tokens.poison(batch.step, batch.sample_rows)
        return batch

    def sample(self, batch: Batch, last: U64, masks: MaskSet | None) -> list[Logprobs]:
        """Draw and publish the step's ids from what `forward` gave; the log probabilities that were asked for."""
        ids = draw(last[batch.sample_rows], batch.sample, masks, self.vocab_size)
        self.tokens.publish(batch.step, batch.sample_rows, batch.slots[batch.sample_rows], ids[:, None])
        return logprobs(batch, ids, self.vocab_size)

    def forward(self, batch: Batch) -> U64:
        """Fill the step's cells; the last cell of each row, uint64[R]. All steps before must be published."""
        last = np.zeros(len(batch.slots), np.uint64)
        ids = batch.input_ids.copy()
        ids[: batch.num_decode] = self.tokens.next[batch.slots[: batch.num_decode]]
        inputs = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(B)
        decode = slice(0, batch.num_decode)
        last[decode] = self._previous(batch) * np.uint64(A) + inputs[decode]
        self.cells[batch.kv_cells[decode]] = last[decode]
        begin = batch.num_decode
        for row in range(batch.num_decode, len(batch.slots)):  # in order: a row may share pages of one before it
            end = begin + int(batch.query_lens[row])
            cells = self._chain(self._previous_of(batch, row), inputs[begin:end])
            self.cells[batch.kv_cells[begin:end]] = cells
            last[row] = cells[-1]
            begin = end
        return last

    def _previous(self, batch: Batch) -> U64:
        """The cell before each decode row's; every decode row has one."""
        before = batch.seq_lens[: batch.num_decode] - 2
        page, offset = np.divmod(before, self.tables.block_size)
        cells: U64 = self.cells[batch.page_table[np.arange(batch.num_decode), page] * self.tables.block_size + offset]
        return cells

    def _previous_of(self, batch: Batch, row: int) -> np.uint64:
        before = int(batch.seq_lens[row] - batch.query_lens[row]) - 1
        if before < 0:
            return np.uint64(0)
        page, offset = divmod(before, self.tables.block_size)
        cell: np.uint64 = self.cells[int(batch.page_table[row, page]) * self.tables.block_size + offset]
        return cell

    def _chain(self, previous: np.uint64, inputs: U64) -> U64:
        """h[k] = A**(k+1) * (previous + sum over j <= k of A**-(j+1) * inputs[j])."""
        count = len(inputs) + 1
        sums = np.cumsum(powers(A_INVERSE, count)[1:] * inputs, dtype=np.uint64)
        return powers(A, count)[1:] * (sums + previous)


class SimDevice:
    """`model` on a device that takes no time: a step is computed and reported when it is launched."""

    failed: Exception | None = None

    def __init__(self, model: HashModel, masks: Masks) -> None:
        self.model, self.masks = model, masks

    def launch(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        received = time.monotonic_ns()
        batch = self.model.prepare(plan)
        started = time.monotonic_ns()
        last = self.model.forward(batch)
        forwarded = time.monotonic_ns()
        masks = self.masks.wait(batch.step) if batch.masked else None
        exposed = time.monotonic_ns() - forwarded if masks else 0
        logprobs = self.model.sample(batch, last, masks)
        ended = time.monotonic_ns()
        masking = masks.written - masks.ordered if masks else 0
        times = (received, started, started, ended, ended)
        done(StepResult(plan.epoch, plan.step, *times, logprobs, masking, exposed))

    def close(self) -> None:
        """Nothing is held."""
