"""A coded linear layer as a checkpoint stores it, and its codes taken out of their packing.

Formats: `runtime.model.coding`; the order of AWQ's eight outputs is AutoAWQ's `gemm` version. Knows no kernel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from runtime.model.coding import IN, OUT, Coding, Kind, Packing
from runtime.model.config import ConfigError
from runtime.model.quantized import GROUP, ZERO, Quantized

Tensor = torch.Tensor
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
WORD = 32  # bits
SCALES = ("weight_scale", "weight_scale_inv", "scales")


@dataclass(frozen=True)
class Coded:
    """A weight [n, k]: (codes - zero) * scale."""

    kind: Kind
    bits: int
    codes: Tensor  # [n, k]: float8_e4m3fn, int8, or uint8 of one code each
    scale: Tensor  # float32[blocks of outputs, blocks of inputs]; the last blocks may be cut off
    block: tuple[int, int]  # its outputs and inputs
    zero: Tensor | None = None  # float32, like scale
    order: Tensor | None = None  # int64[k]: the input that belongs to each column of the codes
    input_scale: Tensor | None = None  # float32[]: of static activations

    def of_each(self, of_blocks: Tensor) -> Tensor:
        """[blocks, blocks] as [n, k]."""
        n, k = self.codes.shape
        return _repeated(_repeated(of_blocks, OUT, self.block[OUT], n), IN, self.block[IN], k)

    def dequantized(self) -> Tensor:
        """float32[n, k], inputs in their order."""
        codes = self.codes.float()
        if self.zero is not None:
            codes -= self.of_each(self.zero)
        weight = codes.mul_(self.of_each(self.scale))
        return weight if self.order is None else weight[:, self.order.argsort()]

    def quantized(self) -> Quantized | None:
        """The same in the groups of the CPU's kernels; None where they have no such codes."""
        if self.kind is Kind.FP8 or self.order is not None or self.codes.shape[IN] % GROUP or self.block[IN] % GROUP:
            return None
        if not torch.allclose(self.scale.half().float(), self.scale, rtol=0.01, atol=0):  # beyond float16
            return None
        if self.zero is None:
            return Quantized((self.codes.short() + ZERO).byte(), self._of_groups(self.scale))
        if self.bits == 8:
            return None if (self.zero != ZERO).any() else Quantized(self.codes, self._of_groups(self.scale))
        return Quantized(self.codes, self._of_groups(self.scale), self._of_groups(-self.zero * self.scale))

    def _of_groups(self, of_blocks: Tensor) -> Tensor:
        n, k = self.codes.shape
        rows = _repeated(of_blocks, OUT, self.block[OUT], n)
        return _repeated(rows, IN, self.block[IN] // GROUP, k // GROUP).half()


@dataclass(frozen=True)
class StoredLinear:
    """What a checkpoint has of a coded layer, or of a rank's part of it: tensors by suffix, on any device.

    It is unpacked one layer at a time, since a code takes a byte then.
    """

    name: str  # of the weight
    coding: Coding
    shape: tuple[int, int]
    parts: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def unpacked(self) -> Coded:
        """Raises `ConfigError` where groups are of several sizes."""
        coding, parts = self.coding, self.parts
        codes, zero = UNPACKING[coding.packing](self)
        scale = next(parts[name] for name in SCALES if name in parts).float()
        scale = scale.t() if "scales" in parts else scale.reshape(1, 1) if scale.dim() < 2 else scale
        input_scale = parts["input_scale"].float().reshape(()) if "input_scale" in coding.tensors else None
        order = self._order() if coding.order in parts else None
        if order is not None:
            codes = codes[:, order]
        return Coded(coding.kind, coding.bits, codes, scale.contiguous(), coding.block, zero, order, input_scale)

    def _order(self) -> Tensor | None:
        """None where inputs stand as their groups do. A rank's groups do not begin with 0."""
        groups = self.parts[self.coding.order].long()
        order = groups.argsort(stable=True)
        even = torch.arange(len(order), device=order.device) // (self.coding.block[IN] or len(order))
        if not torch.equal(groups[order] - groups.amin(), even):
            raise ConfigError(f"{self.name}: the groups of {self.coding.order} are not all of group_size inputs")
        return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order


def as_numbers(weights: dict[str, Tensor | StoredLinear], dtype: torch.dtype) -> None:
    """In place, one by one."""
    for name, one in weights.items():
        if isinstance(one, StoredLinear):
            weights[name] = one.unpacked().dequantized().to(dtype)


def in_words(held: Counter[str]) -> str:
    """What coded layers became, and how many of them; "" where there were none."""
    return ", ".join(f"{words} ({count})" for words, count in held.items())


def _repeated(entries: Tensor, dim: int, per: int, size: int) -> Tensor:
    """Each entry along `dim` for `per` numbers, `size` in all."""
    per = min(per or size, size)
    return entries.repeat_interleave(per, dim).narrow(dim, 0, size) if per > 1 else entries


def _bits(words: Tensor, bits: int) -> Tensor:
    """int32[...] as uint8[..., codes of a word], lowest bits first."""
    return torch.stack([(words >> shift & (1 << bits) - 1).byte() for shift in range(0, WORD, bits)], -1)


def _plain(layer: StoredLinear) -> tuple[Tensor, None]:
    return layer.parts["weight"], None


def _along(layer: StoredLinear) -> tuple[Tensor, Tensor]:
    n, k = layer.shape
    bits, parts = layer.coding.bits, layer.parts
    codes = _bits(parts["weight_packed"], bits).flatten(1)[:, :k]
    if "weight_zero_point" not in parts:
        return codes.contiguous(), torch.full_like(parts["weight_scale"], 1 << bits - 1, dtype=torch.float32)
    zeros = _bits(parts["weight_zero_point"].t(), bits).flatten(1)[:, :n]
    return codes.contiguous(), zeros.t().float()


def _gptq(layer: StoredLinear) -> tuple[Tensor, Tensor]:
    n, k = layer.shape
    coding, parts = layer.coding, layer.parts
    codes = _bits(parts["qweight"].t(), coding.bits).flatten(1)[:, :k]
    zeros = _bits(parts["qzeros"], coding.bits).flatten(1)[:, :n]
    zeros = (zeros.int() + coding.zero_is_less) & (1 << coding.bits) - 1
    return codes.contiguous(), zeros.t().float()


def _awq(layer: StoredLinear) -> tuple[Tensor, Tensor]:
    place = torch.tensor(AWQ_ORDER).argsort()
    codes, zeros = (
        _bits(layer.parts[name], layer.coding.bits)[..., place].flatten(1).t() for name in ("qweight", "qzeros")
    )
    return codes.contiguous(), zeros.float()


UNPACKING = {Packing.NONE: _plain, Packing.ALONG: _along, Packing.GPTQ: _gptq, Packing.AWQ: _awq}
