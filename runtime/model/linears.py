"""What multiplies a layer's inputs by its weight. Members: numbers here, kernels for codes in `coded_linears`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch.nn.functional import linear

from runtime.model.coded import StoredLinear

Tensor = torch.Tensor
Weight = Tensor | StoredLinear


class Linear(Protocol):
    @property
    def nbytes(self) -> int:
        """Of the weight as it is held."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] to [T, n], of the dtype of `x`; T is 1 at least."""


Pack = Callable[[list[Weight], Tensor | None], Linear]  # layers [n, k] of the same inputs, outputs in order; all's bias


class Numbers:
    """`weight` [n, k] as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.nbytes = weight, bias, weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class SideBySide:
    """Layers of the same inputs that no kernel takes as one."""

    def __init__(self, linears: list[Linear], bias: Tensor | None) -> None:
        self.linears, self.bias = linears, bias
        self.nbytes = sum(one.nbytes for one in linears)

    def __call__(self, x: Tensor) -> Tensor:
        outputs = torch.cat([one(x) for one in self.linears], -1)
        return outputs if self.bias is None else outputs.add_(self.bias)


def pack_numbers(weights: list[Weight], bias: Tensor | None) -> Linear:
    """`Pack` for any device, of numbers alone."""
    found = [one for one in weights if isinstance(one, Tensor)]
    assert len(found) == len(weights), "codes need `coded_linears.Packer`"
    return Numbers(found[0] if len(found) == 1 else torch.cat(found), bias)


def dtype_of(weights: Mapping[str, Weight]) -> torch.dtype:
    """Of a model's numbers."""
    norm = weights["model.norm.weight"]
    assert isinstance(norm, Tensor)
    return norm.dtype
