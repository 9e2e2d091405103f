"""The Llama family in plain torch as the CPU device runs it: the reference of the C kernels, and what runs without.

It is also what tensor-parallel ranks run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.attention.cpu import CpuAttention
from runtime.batch import Batch
from runtime.collective import Collective
from runtime.kv_cache import KVCache
from runtime.model.coded import as_numbers
from runtime.model.config import ModelConfig
from runtime.model.linears import Weight, dtype_of
from runtime.model.llama import Llama

Tensor = torch.Tensor


class TorchModel:
    """`weights` are named as in the checkpoint; codes become numbers.

    `config` and they are those of one rank where `ranks` has several.
    """

    cache: KVCache

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], ranks: Collective | None = None) -> None:
        self.config, self.dtype = config, dtype_of(weights)
        as_numbers(weights, self.dtype)
        self.model = Llama(config, weights, 1, ranks)
        self.nbytes = self.model.nbytes

    def attach(self, cache: KVCache, max_len: int) -> None:
        """Keys and values of requests of up to `max_len` tokens are kept in `cache` from now on."""
        self.cache = cache
        self.model.reach(max_len)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] to float32[S, vocab_size]."""
        return self.model.logits(hidden)

    def forward(self, batch: Batch, input_ids: NDArray[np.int32]) -> Tensor:
        """The normed states of the step's tokens, [T, hidden_size]; `input_ids` int32[T]."""
        attention = CpuAttention(batch, self.cache, self.config.sliding_window)
        ids, positions, reach = (
            torch.from_numpy(part.astype(np.int64)) for part in (input_ids, batch.positions, batch.reach)
        )
        return self.model.forward(ids, positions, reach, attention)
