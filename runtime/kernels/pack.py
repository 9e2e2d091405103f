"""Weights of linear layers laid out for the kernels: tiles of TILE output columns, inputs in order.

float32 is [n / TILE, k, TILE]; bfloat16 [n / TILE, k / 2, TILE, 2], the two of a pair in one 32-bit lane. Outputs are
padded with zeros to whole pairs of tiles. Packed weights lie in huge pages where the kernel has them.
"""

from __future__ import annotations

import mmap

import torch

from runtime.kernels.library import BF16, F32, TILE, Linear

Tensor = torch.Tensor


class Unsupported(ValueError):
    """What the kernels cannot do; the torch path can."""


class Packed:
    """One linear layer: `struct` for the kernels, and the tensors that it points into."""

    def __init__(self, tiles: Tensor, n: int, k: int, kind: int, bias: Tensor | None) -> None:
        self.tiles, self.bias = _resident(tiles), None if bias is None else _padded(bias.float())
        self.struct = Linear(kind, n, k, self.tiles.data_ptr(), None if self.bias is None else self.bias.data_ptr())

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes


def pack(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """`weight` [n, k] in float32 or bfloat16. Raises `Unsupported`."""
    n, k = weight.shape
    return Packed(_tiles(_padded(weight)), n, k, kind_of(weight.dtype), bias)


def pack_gated(gate: Tensor, up: Tensor) -> Packed:
    """Two layers [n, k] whose tiles take turns: silu(gate) * up is computed where both are at hand."""
    first, second = (_tiles(_padded(weight, TILE)) for weight in (gate, up))
    tiles = torch.stack((first, second), 1).flatten(0, 1)
    return Packed(tiles, 2 * len(gate), gate.shape[1], kind_of(gate.dtype), None)


def kind_of(dtype: torch.dtype) -> int:
    kinds = {torch.float32: F32, torch.bfloat16: BF16}
    if dtype not in kinds:
        raise Unsupported(f"{dtype} weights")
    return kinds[dtype]


def _padded(weight: Tensor, to: int = 2 * TILE) -> Tensor:
    missing = -len(weight) % to
    return torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:]))) if missing else weight


def _tiles(weight: Tensor) -> Tensor:
    n, k = weight.shape
    if k % 2:
        raise Unsupported(f"an odd number of inputs, {k}")
    lanes = weight.contiguous().view(torch.int32)  # pairs move as one
    return lanes.view(n // TILE, TILE, -1).transpose(1, 2)


def _resident(tensor: Tensor) -> Tensor:
    """A contiguous copy in memory of its own, in huge pages if the kernel gives them."""
    memory = mmap.mmap(-1, max(tensor.nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
