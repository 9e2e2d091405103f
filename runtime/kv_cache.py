"""Paged KV in torch: one tensor of keys and one of values per layer. Knows no request and no page's owner."""

from __future__ import annotations

import numpy as np
import torch

Tensor = torch.Tensor


class KVCache:
    """keys[layer], values[layer]: [num_blocks, block_size, kv_heads, head_dim]; cell = page * block_size + offset."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """On the CPU without `device`."""
        self.block_size = block_size
        shape = (num_blocks, block_size, kv_heads, head_dim)

        def zeros() -> list[Tensor]:
            return [
                torch.zeros(shape, dtype=dtype, device=device) if device else _lazy_zeros(shape, dtype)
                for _ in range(layers)
            ]

        self.keys, self.values = zeros(), zeros()

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values, [T, kv_heads, head_dim], into `cells`, int64[T]."""
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            indexable(cache).flatten(0, 1)[cells] = indexable(new)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of int64[R, P] pages, each [R, kv_heads, P * block_size, head_dim]."""
        rows = len(pages)
        keys, values = (
            cache[layer].index_select(0, pages.flatten()).view(rows, -1, *cache[layer].shape[2:]).transpose(1, 2)
            for cache in (self.keys, self.values)
        )
        return keys, values


def indexable(tensor: Tensor) -> Tensor:
    """The same memory in a type that every device can index: numbers of a byte, float8 among them, as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until written, unlike torch's. Padding must be finite: 0 times NaN is NaN."""
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)


def bytes_per_block(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize
