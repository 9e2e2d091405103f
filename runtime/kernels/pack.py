"""Weights of linear layers laid out for the kernels: tiles of TILE output columns, inputs in order.

A line is a 32-bit lane for each column, with one float32, two bfloat16, four int8 or eight int4 codes of consecutive
inputs; of int4, the first four in the lower halves of the bytes. A group of codes begins with its columns' scales, of
int4 with their offsets too. Outputs are padded with zeros to whole pairs of tiles. Packed weights lie in huge pages
where the system has them.
"""

from __future__ import annotations

import mmap

import torch

from runtime.kernels.library import BF16, F32, INT4, INT8, TILE, Linear
from runtime.model.quantized import GROUP, ZERO, Quantized, quantize, together

Tensor = torch.Tensor
Weight = Tensor | Quantized


class Unsupported(ValueError):
    """What the kernels cannot do; of plain weights the torch path can."""


class Packed:
    """One linear layer: `struct` for the kernels, and the tensors that it points into."""

    def __init__(self, tiles: Tensor, n: int, k: int, kind: int, bias: Tensor | None) -> None:
        self.tiles, self.bias = _resident(tiles), None if bias is None else _padded(bias.float(), 2 * TILE)
        self.struct = Linear(kind, n, k, self.tiles.data_ptr(), None if self.bias is None else self.bias.data_ptr())

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes


def pack(weight: Weight, bias: Tensor | None = None) -> Packed:
    """`weight` [n, k] in float32, bfloat16 or codes. Raises `Unsupported`."""
    n, k = weight.shape
    return Packed(_tiles(weight, 2 * TILE), n, k, kind_of(weight), bias)


def pack_gated(gate: Weight, up: Weight) -> Packed:
    """Two layers [n, k] whose tiles take turns: silu(gate) * up is computed where both are at hand."""
    gate, up = alike([gate, up])
    tiles = torch.stack((_tiles(gate, TILE), _tiles(up, TILE)), 1).flatten(0, 1)
    return Packed(tiles, 2 * gate.shape[0], gate.shape[1], kind_of(gate), None)


def pack_together(weights: list[Weight], bias: Tensor | None) -> Packed:
    """Layers with the same inputs as one, outputs in order."""
    weights = alike(weights)
    coded = [one for one in weights if isinstance(one, Quantized)]
    return pack(together(coded) if coded else torch.cat([one for one in weights if isinstance(one, Tensor)]), bias)


def alike(weights: list[Weight]) -> list[Weight]:
    """As they are, or all in int8 where a GGUF file has several kinds of what lies together here."""
    if len({kind_of(one) for one in weights}) == 1:
        return weights
    return [quantize(one.dequantized() if isinstance(one, Quantized) else one, 8) for one in weights]


def kind_of(weight: Weight) -> int:
    if isinstance(weight, Quantized):
        return INT8 if weight.bits == 8 else INT4
    return kind_of_dtype(weight.dtype)


def kind_of_dtype(dtype: torch.dtype) -> int:
    kinds = {torch.float32: F32, torch.bfloat16: BF16}
    if dtype not in kinds:
        raise Unsupported(f"{dtype} weights")
    return kinds[dtype]


def _padded(weight: Tensor, to: int) -> Tensor:
    missing = -len(weight) % to
    return torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:]))) if missing else weight


def _tiles(weight: Weight, to: int) -> Tensor:
    """[tiles, ...], as many outputs as are a multiple of `to`."""
    if isinstance(weight, Quantized):
        return _coded_tiles(weight, to)
    k = weight.shape[1]
    if k % 2:
        raise Unsupported(f"an odd number of inputs, {k}")
    lanes = _padded(weight.contiguous(), to).view(torch.int32)  # pairs move as one
    return lanes.view(-1, TILE, lanes.shape[1]).transpose(1, 2)


def _coded_tiles(weight: Quantized, to: int) -> Tensor:
    """uint8[tiles, groups, bytes of a group]."""
    inputs = 32 // weight.bits  # of a line
    codes = _padded(weight.codes ^ ZERO if weight.bits == 8 else weight.codes, to)  # int8 is signed here
    lines = codes.view(-1, TILE, weight.shape[1] // GROUP, GROUP // inputs, inputs).permute(0, 2, 3, 1, 4)
    if weight.bits == 4:
        lines = lines[..., :4] | lines[..., 4:] << 4
    headers = [_header(one, to) for one in (weight.scale, weight.offset) if one is not None]
    return torch.cat([*headers, lines.flatten(2)], -1)


def _header(halves: Tensor, to: int) -> Tensor:
    """float16[n, groups] as uint8[tiles, groups, 2 * TILE]."""
    halves = _padded(halves, to)
    return halves.view(-1, TILE, halves.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _resident(tensor: Tensor) -> Tensor:
    """A contiguous copy in memory of its own, in huge pages if the system gives them."""
    memory = mmap.mmap(-1, max(tensor.nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
