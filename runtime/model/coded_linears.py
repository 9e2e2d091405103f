"""Coded layers on a GPU: by torch's kernels where they exist, else as numbers again.

fp8: `torch._scaled_mm`, of tensors and channels, and in blocks (DeepSeek's scheme, by cuBLAS on Hopper); int8 of
weights and activations: `torch._int_mm`; 4 bits of weights alone: `torch._weight_int4pack_mm`. Results are bfloat16.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn.functional import pad

from runtime.model.coded import Coded, StoredLinear, in_words
from runtime.model.coding import ALL, IN, OUT, Activations, Kind
from runtime.model.linears import Linear, Numbers, SideBySide, Weight, pack_numbers

Tensor = torch.Tensor
MOST_FP8, MOST_INT8 = 448.0, 127.0
LEAST = 1e-12  # of a scale: inputs that are all 0 have one too
BLOCK = 128  # of fp8 in blocks
BLOCK_INPUTS = 4 * BLOCK  # torch versions lay out the scales of other numbers of inputs differently
BLOCK_ROWS = 4  # cuBLAS wants a multiple
GROUPS = (32, 64, 128, 256)  # inputs of a group that the int4 kernel has
FEWEST = 32  # rows of an int8 product; torch wants more than 16
TILE, TILES = 16, (8, 4, 2)  # inputs of one, and how many lie side by side for the int4 kernel
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """What decides which kernels there are."""

    capability: tuple[int, int]  # of the GPU
    cuda: tuple[int, int]  # version that torch is built for
    dtype: torch.dtype  # of activations


def cuda_version() -> tuple[int, int]:
    """What torch is built for."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)


class Kernel(Protocol):
    """Makes a layer that computes by it."""

    words: str

    def __call__(self, coded: Coded, bias: Tensor | None) -> Linear: ...


class _ByOutput:
    """A scale for each output; inputs by one scale, or by one for each token."""

    def __init__(self, coded: Coded, bias: Tensor | None) -> None:
        self.weight, self.bias, self.static = coded.codes.contiguous().t(), bias, coded.input_scale
        self.scale = coded.scale.expand(len(coded.codes), 1).contiguous().t()
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    def input_scale(self, x: Tensor, most: float) -> Tensor:
        """float32[T, 1]."""
        return _scale(x, most) if self.static is None else self.static.repeat(len(x), 1)


class Fp8(_ByOutput):
    words = "fp8 by torch"

    def __call__(self, x: Tensor) -> Tensor:
        scale = self.input_scale(x, MOST_FP8)
        return torch._scaled_mm(_fp8(x / scale), self.weight, scale, self.scale, bias=self.bias, out_dtype=x.dtype)


class Fp8Blocks:
    """A scale for each block of 128 by 128; inputs by one for each token's 128."""

    words = "fp8 in blocks by torch"

    def __init__(self, coded: Coded, bias: Tensor | None) -> None:
        self.weight, self.bias = coded.codes.contiguous().t(), bias
        self.scale = coded.scale.contiguous().t()
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        rows = pad(x, (0, 0, 0, -len(x) % BLOCK_ROWS))
        blocks = rows.reshape(len(rows), -1, BLOCK)
        scale = _scale(blocks, MOST_FP8)
        by_column = scale[..., 0].t().contiguous().t()  # a column's scales lie side by side
        codes = _fp8(blocks / scale).flatten(1)
        outputs = torch._scaled_mm(codes, self.weight, by_column, self.scale, out_dtype=x.dtype)[: len(x)]
        return outputs if self.bias is None else outputs + self.bias


class Int8(_ByOutput):
    words = "int8 by torch"

    def __call__(self, x: Tensor) -> Tensor:
        scale = self.input_scale(x, MOST_INT8)
        codes = (x / scale).round_().clamp_(-MOST_INT8, MOST_INT8).to(torch.int8)
        sums = torch._int_mm(pad(codes, (0, 0, 0, max(0, FEWEST - len(x)))), self.weight)[: len(x)]
        outputs = (sums.float() * scale * self.scale).to(x.dtype)
        return outputs if self.bias is None else outputs.add_(self.bias)


class Int4:
    """Codes of groups of inputs; inputs are bfloat16."""

    words = "int4 by torch"

    def __init__(self, coded: Coded, bias: Tensor | None) -> None:
        assert coded.zero is not None
        pairs = coded.codes[:, ::2] << 4 | coded.codes[:, 1::2]  # the even input's bits are the upper ones
        tiles = next(count for count in TILES if coded.codes.shape[IN] % (count * TILE) == 0)
        self.weight = torch._convert_weight_to_int4pack(pairs.contiguous(), tiles)
        offset = (8 - coded.zero) * coded.scale  # the kernel's codes are 8 above theirs
        self.scales = torch.stack((coded.scale.t(), offset.t()), -1).bfloat16().contiguous()
        self.group, self.order, self.bias = coded.block[IN], coded.order, bias
        self.nbytes = self.weight.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous() if self.order is None else x.index_select(1, self.order)
        outputs: Tensor = torch._weight_int4pack_mm(x, self.weight, self.group, self.scales)
        return outputs if self.bias is None else outputs.add_(self.bias)


def kernel_for(coded: Coded, activations: Activations, device: Device) -> Kernel | None:
    """The one for such a layer on such a device; None where there is none."""
    if device.dtype != torch.bfloat16:
        return None
    if coded.kind is Kind.CODES:
        return Int4 if _fits_int4(coded, device) else None
    if activations is Activations.NUMBERS:
        return None
    if coded.block == (BLOCK, BLOCK):
        return Fp8Blocks if _fits_blocks(coded, device) else None
    kernel, multiple, least = (Fp8, 16, (8, 9)) if coded.kind is Kind.FP8 else (Int8, 8, (8, 0))
    by_output = coded.scale.shape[IN] == 1 and coded.block[OUT] in (1, ALL)
    aligned = all(size % multiple == 0 for size in coded.codes.shape)
    return kernel if by_output and aligned and device.capability >= least else None


def _fits_int4(coded: Coded, device: Device) -> bool:
    (n, k), group = coded.codes.shape, coded.block[IN]
    groups = coded.bits == 4 and group in GROUPS and k % group == 0
    return groups and n % 8 == 0 and k % (TILES[-1] * TILE) == 0 and device.capability >= (8, 0)


def _fits_blocks(coded: Coded, device: Device) -> bool:
    n, k = coded.codes.shape
    aligned = coded.kind is Kind.FP8 and n % BLOCK == k % BLOCK_INPUTS == 0
    return aligned and device.capability == (9, 0) and device.cuda >= (12, 9)


class Packer:
    """`Pack` for a device. `held` counts what layers became."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.held: Counter[str] = Counter()

    def __call__(self, weights: list[Weight], bias: Tensor | None) -> Linear:
        numbers = [one for one in weights if isinstance(one, Tensor)]
        if len(numbers) == len(weights):
            return pack_numbers(weights, bias)
        if numbers:
            return SideBySide([self([one], None) for one in weights], bias)
        stored = [one for one in weights if isinstance(one, StoredLinear)]
        coded = [one.unpacked() for one in stored]
        one = together(coded)
        if one is None:
            return SideBySide([self._linear(part, stored[0], None) for part in coded], bias)
        return self._linear(one, stored[0], bias)

    def _linear(self, coded: Coded, stored: StoredLinear, bias: Tensor | None) -> Linear:
        kernel = kernel_for(coded, stored.coding.activations, self.device)
        if kernel is None:
            kind = str(self.device.dtype).removeprefix("torch.")
            words = f"{stored.coding.name} as {kind}, for want of a kernel"
            if words not in self.held:
                log.warning("%s takes the memory of the original: %s", words, stored.name)
            self.held[words] += 1
            return Numbers(coded.dequantized().to(self.device.dtype), bias)
        self.held[kernel.words] += 1
        return kernel(coded, bias)

    @property
    def words(self) -> str:
        """Layers of the same inputs count once."""
        return in_words(self.held)


def together(parts: list[Coded]) -> Coded | None:
    """Layers of the same inputs as one, outputs in order; None where their blocks or orders do not allow it."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(not _alike(first, one) for one in parts):
        return None
    rows = first.block[OUT]
    if rows and any(len(one.codes) % rows for one in parts[:-1]):
        return None
    scales = [one.scale if rows else one.scale.expand(len(one.codes), -1) for one in parts]
    zeros = [one.zero for one in parts if one.zero is not None]
    inputs = [one.input_scale for one in parts if one.input_scale is not None]
    return replace(
        first,
        codes=torch.cat([one.codes for one in parts]),
        scale=torch.cat(scales),
        block=(rows or 1, first.block[IN]),
        zero=torch.cat(zeros) if zeros else None,
        input_scale=torch.stack(inputs).amax() if inputs else None,
    )


def _alike(one: Coded, other: Coded) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _scale(x: Tensor, most: float) -> Tensor:
    """float32[..., 1] by which the rows of `x` [..., k] are divided, so that they fit into -most..most."""
    return (x.abs().amax(-1, keepdim=True).float() / most).clamp_min_(LEAST)


def _fp8(x: Tensor) -> Tensor:
    return x.clamp_(-MOST_FP8, MOST_FP8).to(torch.float8_e4m3fn)
