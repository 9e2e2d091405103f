"""What a layer does beside its products and its attention: norms, rotation, the gate.

Members: torch, and flashinfer's fused kernels for a GPU. Knows no weight by its name and no page.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.nn.functional import silu

from runtime.model.rope import Rope, rotate

Tensor = torch.Tensor
Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries and keys, [T, heads, head_dim] each, rotated


class LayerOps(Protocol):
    """Results have the dtype of `x`; sums are float32."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (Zhang and Sennrich 2019)."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual`, [T, hidden_size], plus `x`, in place, and then its norm; `x` may be overwritten."""

    def gate(self, both: Tensor) -> Tensor:
        """[T, 2n], gates and then values, to [T, n]: silu of the one times the other."""

    def turn(self, rope: Rope, positions: Tensor, reach: Tensor, dtype: torch.dtype) -> Turn:
        """How a step's queries and keys are rotated in each layer; int64[T] each (`reach`: see `Rope.at`)."""


class TorchLayerOps:
    """`LayerOps` on any device."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm(residual.add_(x), weight, eps)

    def gate(self, both: Tensor) -> Tensor:
        gates, values = both.chunk(2, -1)
        return silu(gates) * values

    def turn(self, rope: Rope, positions: Tensor, reach: Tensor, dtype: torch.dtype) -> Turn:
        cos, sin = rope.at(positions, reach, dtype)
        return lambda queries, keys: (rotate(queries, cos, sin), rotate(keys, cos, sin))


class FlashinferLayerOps(TorchLayerOps):
    """`LayerOps` for float16 and bfloat16 on a GPU. Dynamic RoPE, whose frequencies differ by token, stays torch's."""

    def __init__(self) -> None:
        self.kernels: Any = import_module("flashinfer")

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat: Tensor = self.kernels.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps)
        return flat.view(x.shape)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.kernels.fused_add_rmsnorm(x, residual, weight, eps)
        return x

    def gate(self, both: Tensor) -> Tensor:
        gated: Tensor = self.kernels.silu_and_mul(both)
        return gated

    def turn(self, rope: Rope, positions: Tensor, reach: Tensor, dtype: torch.dtype) -> Turn:
        if rope.dynamic:
            return super().turn(rope, positions, reach, dtype)

        def turned(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            queries, keys = queries.contiguous(), keys.contiguous()
            flat, dim = (queries.flatten(1), keys.flatten(1)), queries.shape[-1]
            self.kernels.apply_rope_with_cos_sin_cache_inplace(positions, *flat, dim, rope.halves)
            return queries, keys

        return turned
