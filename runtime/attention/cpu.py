"""Attention over paged KV in plain torch: pages gathered per row, then scaled dot product. The reference on the CPU."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime.batch import Batch
from runtime.kv_cache import KVCache

Tensor = torch.Tensor


class CpuAttention:
    """One step's attention: built from its `Batch`, called once per layer. All KV is written before any row attends."""

    def __init__(self, batch: Batch, cache: KVCache, window: int | None) -> None:
        self.cache, self.window = cache, window
        self.cells = torch.from_numpy(batch.kv_cells)
        size = cache.block_size
        table = torch.from_numpy(batch.page_table.astype("int64"))
        cells = (table[:, :, None] * size + torch.arange(size)).flatten(1)
        self.rows = []
        begin = 0
        for row, (length, queries) in enumerate(zip(batch.seq_lens.tolist(), batch.query_lens.tolist(), strict=True)):
            self.rows.append((begin, begin + queries, cells[row, :length], self._mask(length, queries)))
            begin += queries

    def _mask(self, length: int, queries: int) -> Tensor:
        """bool[queries, length]: what each query may see."""
        at, key = torch.arange(length - queries, length)[:, None], torch.arange(length)[None]
        seen = key <= at
        return seen if self.window is None else seen & (key > at - self.window)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[T, heads, head_dim] and twice [T, kv_heads, head_dim] to [T, heads, head_dim]."""
        self.cache.write(layer, self.cells, keys, values)
        out = torch.empty_like(queries)
        for begin, end, cells, mask in self.rows:
            past = (self.cache.keys[layer][cells], self.cache.values[layer][cells])
            key, value = (x.transpose(0, 1)[None] for x in past)
            query = queries[begin:end].transpose(0, 1)[None]
            answer = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
            out[begin:end] = answer[0].transpose(0, 1)
        return out
