"""Paged KV in torch: one tensor of keys and one of values per layer. Knows no request and no page's owner."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class KVCache:
    """keys[layer], values[layer]: [num_blocks * block_size, kv_heads, head_dim]; cell = page * block_size + offset."""

    def __init__(
        self, layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks * block_size, kv_heads, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype) for _ in range(layers)]

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values, [T, kv_heads, head_dim], into `cells`, int64[T]."""
        self.keys[layer][cells] = keys
        self.values[layer][cells] = values


def bytes_per_block(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize
