"""The worker's side of the step protocol: what it remembers of each slot, and a plan unfolded into a step's arrays.

Plans carry differences only, so the page tables, lengths and sampling settings live here, as one numpy array per field
indexed by slot. Devices (`runtime.device`) see `Batch` alone. Knows no torch, no device, no token: the input id of a
decode row is read from `TokenTable.next[slot]` by the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.slot_sampling import SampleBatch, SlotSampling
from runtime.step import ID_DTYPE, SLOT_DTYPE, SlotAdmission, StepPlan

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class PromptRow:
    """A chunk row whose prompt's log probabilities are told."""

    row: int  # among the R
    first: int  # position of the first token told about: the one after the chunk's first
    targets: I32  # the tokens themselves; one fewer than the chunk's where that ends the prompt
    top: int  # how many of the most likely ids are told beside each


@dataclass(frozen=True)
class Batch:
    """One step as arrays; R rows (the first `num_decode` are decode rows), T tokens."""

    step: int
    num_decode: int
    slots: I32  # [R]
    query_lens: I32  # [R] tokens computed by each row
    seq_lens: I32  # [R] tokens of the row whose KV exists once this step has run
    input_ids: I32  # [T]; the first num_decode are 0 and are to be read from TokenTable.next[slots]
    positions: I32  # [T]
    reach: I32  # [T] the longer of the row's prompt and the tokens up to this one (dynamic RoPE needs it)
    kv_cells: I64  # [T] where each token's KV goes: page * block_size + offset
    page_table: I32  # [R, pages of the longest row]; unused entries are 0, the scratch page
    sample_rows: I32  # [S] rows that sample, ascending
    sample: SampleBatch
    masked: bool  # the masks of its constrained rows follow in a message of their own
    prompts: list[PromptRow]

    @property
    def last_tokens(self) -> I64:
        """int64[S]: for each sampling row, the index of its last token among the T."""
        return np.cumsum(self.query_lens, dtype=np.int64)[self.sample_rows] - 1


class SlotTables:
    """What the worker knows of each slot. `apply` takes a plan's differences and returns the step's arrays.

    Raises `ValueError` where a plan cannot be: another epoch, a gap in the step numbers, a row beyond its pages.
    """

    def __init__(self, num_slots: int, max_pages: int, block_size: int, epoch: int = 0) -> None:
        self.block_size = block_size
        self.epoch = epoch
        self.next_step = 0
        self.pages = np.zeros((num_slots, max_pages), np.int32)
        self.num_pages = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.sampling = SlotSampling(num_slots)

    @property
    def max_len(self) -> int:
        """Tokens that a slot's pages hold."""
        return self.pages.shape[1] * self.block_size

    def apply(self, plan: StepPlan) -> Batch:
        """Take over what the plan adds and unfold its rows."""
        self._check(plan)
        for admission in plan.admitted:
            self._admit(admission)
        self._append_pages(np.frombuffer(plan.page_slots, SLOT_DTYPE), np.frombuffer(plan.pages, ID_DTYPE))
        return self._unfold(plan)

    def _check(self, plan: StepPlan) -> None:
        if plan.epoch != self.epoch:
            raise ValueError(f"plan of epoch {plan.epoch}, expected {self.epoch}")
        if plan.step != self.next_step:
            raise ValueError(f"plan of step {plan.step}, expected {self.next_step}")
        self.next_step += 1

    def _admit(self, admission: SlotAdmission) -> None:
        slot = admission.slot
        pages = np.frombuffer(admission.pages, ID_DTYPE)
        self.pages[slot] = 0
        self.pages[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.num_computed[slot] = admission.start
        self.num_prompt[slot] = admission.num_prompt
        ids = np.frombuffer(admission.history, ID_DTYPE)
        self.sampling.admit(slot, admission.sampling, admission.num_prompt, ids)

    def _append_pages(self, slots: NDArray[np.uint16], pages: I32) -> None:
        if not len(slots):
            return
        starts = np.flatnonzero(np.r_[True, slots[1:] != slots[:-1]])  # pages of one slot stand together
        within = np.arange(len(slots)) - np.repeat(starts, np.diff(np.r_[starts, len(slots)]))
        self.pages[slots, self.num_pages[slots] + within] = pages
        np.add.at(self.num_pages, slots, 1)

    def _unfold(self, plan: StepPlan) -> Batch:
        decode = np.frombuffer(plan.decode_slots, SLOT_DTYPE)
        chunk_lens = np.frombuffer(plan.chunk_lens, ID_DTYPE)
        slots = np.concatenate((decode, np.frombuffer(plan.chunk_slots, SLOT_DTYPE))).astype(np.int32)
        query_lens = np.concatenate((np.ones(len(decode), np.int32), chunk_lens))
        starts = self.num_computed[slots]
        seq_lens = starts + query_lens
        if (seq_lens > self.num_pages[slots] * self.block_size).any():
            raise ValueError(f"step {plan.step} computes tokens beyond the pages of their slot")
        self.num_computed[slots] = seq_lens
        rows = np.repeat(np.arange(len(slots)), query_lens)
        first = np.cumsum(query_lens) - query_lens
        positions = (np.arange(len(rows)) - first[rows] + starts[rows]).astype(np.int32)
        table = self.pages[slots, : -(-int(seq_lens.max(initial=0)) // self.block_size)]
        cells = (
            table[rows, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        )
        samples = np.r_[np.ones(len(decode), bool), np.frombuffer(plan.chunk_samples, np.uint8).astype(bool)]
        sample_rows = np.flatnonzero(samples).astype(np.int32)
        ids = np.zeros(len(rows), np.int32)
        ids[len(decode) :] = np.frombuffer(plan.chunk_ids, ID_DTYPE)
        sample = self.sampling.batch(slots[sample_rows], seq_lens[sample_rows].astype(np.int64))
        reach = np.maximum(self.num_prompt[slots][rows], positions + 1)
        return Batch(
            plan.step,
            len(decode),
            slots,
            query_lens,
            seq_lens,
            ids,
            positions,
            reach,
            cells,
            table,
            sample_rows,
            sample,
            plan.masked,
            self._prompts(len(decode), slots, starts, seq_lens),
        )

    def _prompts(self, num_decode: int, slots: I32, starts: I32, ends: I32) -> list[PromptRow]:
        """Of the chunk rows, those whose prompt's log probabilities are told and that compute some."""
        tops = self.sampling.prompt_logprobs[slots]
        found = []
        for row in (np.flatnonzero(tops[num_decode:] >= 0) + num_decode).tolist():
            first = int(starts[row]) + 1
            targets = self.sampling.prompt(int(slots[row]))[first : ends[row] + 1]
            if len(targets):
                found.append(PromptRow(row, first, targets, int(tops[row])))
        return found
