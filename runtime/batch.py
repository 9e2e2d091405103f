"""The worker's side of the step protocol: what it remembers of each slot, and a plan unfolded into a step's arrays.

Plans carry differences only, so the page tables, lengths and sampling settings live here, as one numpy array per field
indexed by slot. Devices (`runtime.device`) see `Batch` alone. Knows no torch, no device, no token: the input id of a
decode row is read from `TokenTable.next[slot]` by the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.sampling import uniform
from runtime.step import ID_DTYPE, SLOT_DTYPE, SlotAdmission, StepPlan

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class SampleBatch:
    """How the sampling rows of a step are drawn; S rows. `uniform` is one number in [0, 1) per row."""

    temperature: F64  # [S]; 0 is greedy
    top_k: I64  # [S]; 0 is off
    top_p: F64  # [S]
    min_p: F64  # [S]
    uniform: F64  # [S]
    banned: list[tuple[int, tuple[int, ...]]]  # (row among the S, ids it may not draw): stop ids before min_tokens

    @property
    def all_greedy(self) -> bool:
        return not self.temperature.any()


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
        self.min_len = np.zeros(num_slots, np.int64)  # below this many tokens `stop_ids` are banned
        self.temperature = np.zeros(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.stop_ids: list[tuple[int, ...]] = [()] * num_slots

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
        slot, sampling = admission.slot, admission.sampling
        pages = np.frombuffer(admission.pages, ID_DTYPE)
        self.pages[slot] = 0
        self.pages[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.num_computed[slot] = admission.start
        self.num_prompt[slot] = admission.num_prompt
        self.min_len[slot] = admission.num_prompt + sampling.min_tokens
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.stop_ids[slot] = sampling.stop_ids

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
        sample = self._sampling(slots[sample_rows], seq_lens[sample_rows].astype(np.int64))
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
        )

    def _sampling(self, slots: I32, lengths: I64) -> SampleBatch:
        early = np.flatnonzero(lengths < self.min_len[slots])
        return SampleBatch(
            self.temperature[slots],
            self.top_k[slots],
            self.top_p[slots],
            self.min_p[slots],
            uniform(self.seed[slots], lengths),
            [(int(row), self.stop_ids[slots[row]]) for row in early],
        )
