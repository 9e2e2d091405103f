"""The CPU as a device: a model over paged KV, on the C kernels or in torch. Computes when launched, reports at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.batch import Batch, SlotTables
from runtime.device.base import Masks, MaskSet, Tokens
from runtime.kv_cache import KVCache
from runtime.logits import Processor
from runtime.logprobs import Raw, of_prompts
from runtime.model.config import ModelConfig
from runtime.sampler import sample
from runtime.sampling_ops import SamplingOps
from runtime.step import Logprobs, StepPlan, StepResult


class CpuModel(Protocol):
    """`runtime.model.packed.PackedLlama`, and its reference `runtime.model.on_torch.TorchModel`."""

    config: ModelConfig
    dtype: torch.dtype  # of keys and values

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""

    def attach(self, cache: KVCache, max_len: int) -> None:
        """Keys and values of requests of up to `max_len` tokens are kept in `cache` from now on."""

    def forward(self, batch: Batch, input_ids: NDArray[np.int32]) -> torch.Tensor:
        """The normed states of the step's tokens, [T, hidden_size]; `input_ids` int32[T]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] to float32[S, vocab_size]."""


class CpuDevice:
    """`model` with `num_blocks` KV pages, page 0 is scratch; `ops` draw its tokens; `processors` by their names."""

    failed: Exception | None = None

    def __init__(
        self,
        model: CpuModel,
        ops: SamplingOps,
        tables: SlotTables,
        tokens: Tokens,
        masks: Masks,
        num_blocks: int,
        processors: Mapping[str, Processor],
    ) -> None:
        self.model, self.ops, self.tables, self.tokens, self.masks = model, ops, tables, tokens, masks
        self.num_blocks, self.processors = num_blocks, processors
        config = model.config
        self.cache = KVCache(
            config.num_layers, num_blocks, tables.block_size, config.num_kv_heads, config.head_dim, model.dtype
        )
        model.attach(self.cache, tables.max_len)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        started = time.monotonic_ns()  # unfolding the plan is work of the same cores
        batch = self.tables.apply(plan)
        self.tokens.poison(batch.step, batch.sample_rows)
        hidden = self._forward(batch)
        forwarded = time.monotonic_ns()
        masks = self.masks.wait(batch.step) if batch.masked else None
        exposed = time.monotonic_ns() - forwarded if masks else 0
        logprobs = self._sample(batch, hidden, masks)
        ended = time.monotonic_ns()
        masking = masks.written - masks.ordered if masks else 0
        times = (started, started, started, ended, ended)
        done(StepResult(plan.epoch, plan.step, *times, logprobs, masking, exposed))

    def close(self) -> None:
        self.cache.keys.clear()
        self.cache.values.clear()

    def _forward(self, batch: Batch) -> torch.Tensor:
        """The states of the step's tokens, [T, hidden_size]."""
        ids = batch.input_ids.copy()
        ids[: batch.num_decode] = self.tokens.next[batch.slots[: batch.num_decode]]
        return self.model.forward(batch, ids)

    def _sample(self, batch: Batch, hidden: torch.Tensor, masks: MaskSet | None) -> list[Logprobs]:
        """Draw and publish; the log probabilities that were asked for."""
        vocab, head = self.tables.sampling.vocab, self.model.logits
        found = of_prompts(batch, vocab, hidden, head, self.ops) if batch.prompts else []
        logits = self.model.logits(hidden[torch.from_numpy(batch.last_tokens)])
        raw = Raw(logits, batch.sample)
        ids = sample(logits, batch.sample, masks, self.processors, self.ops)
        self.tokens.publish(batch.step, batch.sample_rows, batch.slots[batch.sample_rows], ids[:, None])
        return found + raw.of(ids, self.ops)
