"""Attention of a step on a GPU: decode rows are one call of a paged wrapper, chunk rows another.

Which wrappers these are says `runtime.attention.backend`; what they are told is the same. All KV of a layer is written
before any row attends. One thread plans and launches, inside `Accelerator.launching`, and launches a step before it
plans the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from runtime.attention.backend import Backend
from runtime.attention.page_lists import PageLists
from runtime.attention.wrappers import Sizes, Wrappers
from runtime.batch import Batch
from runtime.device.accelerator import Accelerator
from runtime.device.put import Put
from runtime.kv_cache import KVCache
from runtime.model.config import ModelConfig

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn


class PagedAttention:
    """For queries of `dtype` and the heads that `config` counts, which are one rank's, over `cache` on `gpu`'s device.

    KV in float8_e4m3fn is stored divided by `k_scale` and `v_scale`; what is out of its range then is cut off.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        gpu: Accelerator,
        backend: Backend,
        dtype: torch.dtype,
        sizes: Sizes,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        self.cache, self.gpu, self.scales = cache, gpu, {"k_scale": k_scale, "v_scale": v_scale}
        kv_dtype = cache.keys[0].dtype
        self.wrappers = Wrappers(config, gpu, backend, dtype, kv_dtype, cache.block_size, sizes)
        self.decode, self.prefill = self.wrappers.decode(), self.wrappers.prefill()
        counts = sizes.rows + 1, sizes.rows * sizes.pages, sizes.rows
        self.buffers = [torch.zeros(count, dtype=torch.int32, device=gpu.device) for count in counts]  # of graphs
        self.cells = torch.zeros(sizes.rows, dtype=torch.int64, device=gpu.device)

    def plan(self, batch: Batch, put: Put) -> StepAttention:
        """Of any step; what is returned may be called until the next plan."""
        rows, decode, size = len(batch.slots), batch.num_decode, self.cache.block_size
        parts = []
        if decode:
            lists = PageLists.of(batch, 0, decode, size)
            self.wrappers.plan_decode(self.decode, lists, put(lists.kv_indices))
            parts.append((self.decode, 0, decode))
        if decode < rows:
            lists = PageLists.of(batch, decode, rows, size)
            self.wrappers.plan_prefill(self.prefill, lists, put(lists.kv_indices))
            parts.append((self.prefill, decode, len(batch.kv_cells)))
        return StepAttention(self, put(batch.kv_cells), parts)

    def graph(self, size: int) -> GraphAttention:
        """For decode steps of up to `size` rows, planned for padding alone so that it can be recorded."""
        with self.gpu.launching():
            return GraphAttention(self, size)

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values, [T, kv_heads, head_dim] each, as the cache stores them, into `cells`, int64[T]."""
        k_scale, v_scale = self.scales.values()
        self.cache.write(layer, cells, self._stored(keys, k_scale), self._stored(values, v_scale))

    def attend(self, wrapper: Any, layer: int, queries: Tensor, out: Tensor) -> None:
        """`queries` and `out`: [T, heads, head_dim], of the rows that the wrapper has planned."""
        caches = self.cache.keys[layer], self.cache.values[layer]
        wrapper.run(q=queries, paged_kv_cache=caches, out=out, **self.scales)

    def _stored(self, new: Tensor, scale: float) -> Tensor:
        dtype = self.cache.keys[0].dtype
        if dtype != FP8:
            return new.to(dtype)
        most = torch.finfo(FP8).max
        return (new / scale).clamp(-most, most).to(FP8)  # which not every torch cuts off: it may become NaN


class StepAttention:
    """Of one step. `parts`: each wrapper with the tokens that it attends for."""

    def __init__(self, paged: PagedAttention, cells: Tensor, parts: list[tuple[Any, int, int]]) -> None:
        self.paged, self.cells, self.parts = paged, cells, parts

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[T, heads, head_dim] and twice [T, kv_heads, head_dim] to [T, heads, head_dim], of the queries' dtype."""
        self.paged.write(layer, self.cells, keys, values)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for wrapper, begin, end in self.parts:
            self.paged.attend(wrapper, layer, queries[begin:end], out[begin:end])
        return out


class GraphAttention:
    """Of decode steps of `size` rows, padded: what a CUDA graph records. Raises `ValueError` for any other step.

    What it reads stands in memory that all sizes share, so one is planned and replayed at a time. Padding writes to
    cell 0, of the scratch page, and reads it.
    """

    def __init__(self, paged: PagedAttention, size: int) -> None:
        self.paged, self.size, self.cells = paged, size, paged.cells[:size]
        indptr, self.indices, last = paged.buffers
        self.wrapper = paged.wrappers.decode(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indptr[: size + 1],
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=last[:size],
        )
        self.step = StepAttention(paged, self.cells, [(self.wrapper, 0, size)])
        self.cells.zero_()
        padding = PageLists.none().padded(size)
        paged.wrappers.plan_decode(self.wrapper, padding, self.indices[:size].zero_())

    def plan(self, batch: Batch, put: Put) -> None:
        """Before each replay, outside of it."""
        if batch.num_decode < len(batch.slots):
            raise ValueError("a graph has no chunk rows")
        lists = PageLists.of(batch, 0, batch.num_decode, self.paged.cache.block_size).padded(self.size)
        cells = np.zeros(self.size, np.int64)
        cells[: batch.num_decode] = batch.kv_cells
        put(cells, self.cells)
        indices = put(lists.kv_indices, self.indices[: len(lists.kv_indices)])
        self.paged.wrappers.plan_decode(self.wrapper, lists, indices)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `StepAttention`, T being `size`."""
        return self.step(layer, queries, keys, values)
