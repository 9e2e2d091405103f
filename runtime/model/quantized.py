"""Weights of a linear layer as codes: code * scale + offset, by groups of GROUP inputs of one output.

int8 codes are symmetric about 128; int4 codes are 0..15 with an offset of their own. Made from a checkpoint's numbers,
or taken as they are from a GGUF file's blocks (ggml's `ggml-quants.c` describes those). Knows no layout of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
GROUP = 32
ZERO = 128  # the int8 code of 0


@dataclass(frozen=True)
class Quantized:
    """Without an offset, codes are int8's."""

    codes: Tensor  # uint8[n, k]
    scale: Tensor  # float16[n, k / GROUP]
    offset: Tensor | None = None  # float16[n, k / GROUP], of int4

    @property
    def bits(self) -> int:
        return 8 if self.offset is None else 4

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether these are the codes of a weight [n, k], all parts of the type and shape that they must have."""
        groups = [one for one in (self.scale, self.offset) if one is not None]
        return (
            len(shape) == 2
            and (self.codes.dtype, tuple(self.codes.shape)) == (torch.uint8, shape)
            and shape[1] % GROUP == 0
            and all((one.dtype, *one.shape) == (torch.float16, shape[0], shape[1] // GROUP) for one in groups)
        )

    def rows(self, index: Tensor) -> Quantized:
        return Quantized(self.codes[index], self.scale[index], None if self.offset is None else self.offset[index])

    def dequantized(self) -> Tensor:
        """float32[n, k]."""
        codes = _groups(self.codes.float(), GROUP)
        offset = self.scale.float() * -ZERO if self.offset is None else self.offset.float()
        weights: Tensor = codes * self.scale.float()[..., None] + offset[..., None]
        return weights.flatten(1)


def together(parts: list[Quantized]) -> Quantized:
    """Outputs in order; all of one kind."""
    offsets = [one.offset for one in parts if one.offset is not None]
    codes, scales = ([getattr(one, part) for one in parts] for part in ("codes", "scale"))
    return Quantized(torch.cat(codes), torch.cat(scales), torch.cat(offsets) if offsets else None)


def quantize(weight: Tensor, bits: int) -> Quantized:
    """`weight` [n, k], k a multiple of GROUP."""
    groups = _groups(weight.float(), GROUP)
    return _int8(groups) if bits == 8 else _int4(groups)


def _int8(groups: Tensor) -> Quantized:
    scale = (groups.abs().amax(-1) / 127).half()
    codes = (groups / _divisor(scale)).round_().clamp_(-127, 127).add_(ZERO)
    return Quantized(codes.byte().flatten(1), scale)


def _int4(groups: Tensor) -> Quantized:
    low, high = groups.amin(-1), groups.amax(-1)
    scale, offset = ((high - low) / 15).half(), low.half()
    codes = ((groups - offset.float()[..., None]) / _divisor(scale)).round_().clamp_(0, 15)
    return Quantized(codes.byte().flatten(1), scale, offset)


def _groups(rows: Tensor, size: int) -> Tensor:
    """[n, k] as [n, k / size, size]."""
    return rows.reshape(len(rows), -1, size)


def _divisor(scale: Tensor) -> Tensor:
    """A group whose scale is 0 has the code of 0 throughout."""
    return scale.float().masked_fill(scale == 0, torch.inf)[..., None]


def from_blocks(kind: str, data: Tensor) -> Quantized:
    """A GGUF tensor of a kind in BLOCKS; `data` uint8[n, bytes of a row]."""
    size, decode = BLOCKS[kind]
    blocks = _groups(data, size)
    return decode(blocks)


def _q8_0(blocks: Tensor) -> Quantized:
    scale = _half(blocks[..., :2])
    codes = (blocks[..., 2:].view(torch.int8).short() + ZERO).byte()
    return Quantized(codes.flatten(1), scale)


def _q4_0(blocks: Tensor) -> Quantized:
    scale = _half(blocks[..., :2])
    return Quantized(_nibbles(blocks[..., 2:]).flatten(1), scale, scale * -8)


def _q4_1(blocks: Tensor) -> Quantized:
    return Quantized(_nibbles(blocks[..., 4:]).flatten(1), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q4_k(blocks: Tensor) -> Quantized:
    """Eight groups of 32 in a block; their scales and minima are six bits each of the block's own."""
    scale, least = _half(blocks[..., :2]).float(), _half(blocks[..., 2:4]).float()
    packed, low = blocks[..., 4:16], blocks[..., 4:12] & 63
    high_scale = (packed[..., 8:12] & 15) | (packed[..., 0:4] >> 6 << 4)
    high_least = (packed[..., 8:12] >> 4) | (packed[..., 4:8] >> 6 << 4)
    scales = torch.cat((low[..., :4], high_scale), -1) * scale[..., None]
    offsets = torch.cat((low[..., 4:], high_least), -1) * -least[..., None]
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Quantized(codes.flatten(1), scales.half().flatten(1), offsets.half().flatten(1))


def _half(two: Tensor) -> Tensor:
    return two.contiguous().view(torch.float16)[..., 0]


def _nibbles(data: Tensor) -> Tensor:
    """All lower halves of the last dimension, then all upper ones."""
    return torch.cat((data & 15, data >> 4), -1)


BLOCKS: dict[str, tuple[int, Callable[[Tensor], Quantized]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
}
