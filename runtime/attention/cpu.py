"""Attention over paged KV in plain torch: pages gathered, then scaled dot product. The reference on the CPU.

Decode rows are one call, padded to the longest; each chunk row is one of its own. The query heads that share a KV head
are folded into the query dimension, so that keys and values are never repeated.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime.batch import Batch
from runtime.kv_cache import KVCache

Tensor = torch.Tensor


class CpuAttention:
    """One step's attention: built from its `Batch`, called once per layer. All KV is written before any row attends."""

    def __init__(self, batch: Batch, cache: KVCache, window: int | None) -> None:
        self.cache, self.window, self.num_decode = cache, window, batch.num_decode
        self.cells = torch.from_numpy(batch.kv_cells)
        table = torch.from_numpy(batch.page_table.astype("int64"))
        lengths = torch.from_numpy(batch.seq_lens.astype("int64"))
        size = cache.block_size
        self.decode_pages = table[: self.num_decode, : self._pages(batch.seq_lens[: self.num_decode].max(initial=0))]
        keys = torch.arange(self.decode_pages.shape[1] * size)
        self.decode_mask = self._seen(lengths[: self.num_decode, None] - 1, keys)[:, None, None]
        self.chunks = []
        begin = self.num_decode
        for row in range(self.num_decode, len(lengths)):
            length, count = int(batch.seq_lens[row]), int(batch.query_lens[row])
            pages = table[row : row + 1, : self._pages(length)]
            at = torch.arange(length - count, length)[:, None]
            self.chunks.append((begin, begin + count, pages, self._seen(at, torch.arange(pages.shape[1] * size))))
            begin += count

    def _pages(self, length: int) -> int:
        return -(-int(length) // self.cache.block_size)

    def _seen(self, at: Tensor, keys: Tensor) -> Tensor:
        """bool[queries, keys]: what a query at each position may see."""
        seen = keys <= at
        return seen if self.window is None else seen & (keys > at - self.window)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[T, heads, head_dim] and twice [T, kv_heads, head_dim] to [T, heads, head_dim]."""
        self.cache.write(layer, self.cells, keys, values)
        kv_heads, dim = keys.shape[1:]
        out = torch.empty_like(queries)
        if self.num_decode:
            folded = queries[: self.num_decode].view(self.num_decode, kv_heads, -1, dim)
            answer = self._attend(layer, folded, self.decode_pages, self.decode_mask)
            out[: self.num_decode] = answer.flatten(1, 2)
        for begin, end, pages, mask in self.chunks:
            folded = queries[begin:end].view(end - begin, kv_heads, -1, dim).permute(1, 2, 0, 3)
            group = folded.shape[1]
            answer = self._attend(layer, folded.flatten(1, 2)[None], pages, mask.repeat(group, 1))
            out[begin:end] = answer.view(kv_heads, group, -1, dim).permute(2, 0, 1, 3).flatten(1, 2)
        return out

    def _attend(self, layer: int, queries: Tensor, pages: Tensor, mask: Tensor) -> Tensor:
        keys, values = self.cache.gather(layer, pages)
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
