"""The CPU as a device: a Llama-family model in torch over paged KV. Computes when launched and reports at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.attention.cpu import CpuAttention
from runtime.batch import Batch, SlotTables
from runtime.device.base import Tokens
from runtime.kv_cache import KVCache
from runtime.model.llama import Llama
from runtime.sampler import sample
from runtime.step import StepPlan, StepResult


class CpuDevice:
    """`model` with `num_blocks` KV pages; page 0 is scratch."""

    def __init__(self, model: Llama, tables: SlotTables, tokens: Tokens, num_blocks: int) -> None:
        self.model, self.tables, self.tokens, self.num_blocks = model, tables, tokens, num_blocks
        config = model.config
        self.cache = KVCache(
            config.num_layers, num_blocks, tables.block_size, config.num_kv_heads, config.head_dim, model.head.dtype
        )

    def launch(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        started = time.monotonic_ns()  # unfolding the plan is work of the same cores
        batch = self.tables.apply(plan)
        self.tokens.poison(batch.step, batch.sample_rows)
        ids = self._compute(batch)
        self.tokens.publish(batch.step, batch.sample_rows, batch.slots[batch.sample_rows], ids[:, None])
        ended = time.monotonic_ns()
        done(StepResult(plan.epoch, plan.step, started, started, started, ended, ended))

    def close(self) -> None:
        self.cache.keys.clear()
        self.cache.values.clear()

    @torch.inference_mode()
    def _compute(self, batch: Batch) -> NDArray[np.int32]:
        """Forward and sample; int32[S]."""
        ids = batch.input_ids.astype(np.int64)
        ids[: batch.num_decode] = self.tokens.next[batch.slots[: batch.num_decode]]
        attention = CpuAttention(batch, self.cache, self.model.config.sliding_window)
        positions, reach = (torch.from_numpy(part.astype(np.int64)) for part in (batch.positions, batch.reach))
        hidden = self.model.forward(torch.from_numpy(ids), positions, reach, attention)
        return sample(self.model.logits(hidden[torch.from_numpy(batch.last_tokens)]), batch.sample)
