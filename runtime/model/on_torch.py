"""The Llama family in plain torch as the CPU device runs it: the reference of the C kernels, and what runs without."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.attention.cpu import CpuAttention
from runtime.batch import Batch
from runtime.kv_cache import KVCache
from runtime.model.llama import Llama

Tensor = torch.Tensor


class TorchModel:
    """`model` over paged KV."""

    cache: KVCache

    def __init__(self, model: Llama) -> None:
        self.model, self.config, self.dtype, self.logits = model, model.config, model.head.dtype, model.logits

    def attach(self, cache: KVCache) -> None:
        """Keys and values are kept in `cache` from now on."""
        self.cache = cache

    def forward(self, batch: Batch, input_ids: NDArray[np.int32]) -> Tensor:
        """The normed states of the step's tokens, [T, hidden_size]; `input_ids` int32[T]."""
        attention = CpuAttention(batch, self.cache, self.config.sliding_window)
        ids, positions, reach = (
            torch.from_numpy(part.astype(np.int64)) for part in (input_ids, batch.positions, batch.reach)
        )
        return self.model.forward(ids, positions, reach, attention)
