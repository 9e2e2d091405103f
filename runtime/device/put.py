"""How the host's arrays come to a device that nobody waits for."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Put(Protocol):
    """The device's way to take an array: through pinned memory of its own, in its stream's order, without waiting."""

    def __call__(self, array: NDArray[Any], into: Tensor | None = None) -> Tensor:
        """`array` on the device, in its shape and dtype, in `into` if given. The array may be changed afterwards."""


def together(put: Put, arrays: list[NDArray[Any]]) -> list[Tensor]:
    """All of them, of one dtype, on the device in one transfer; none where there is nothing."""
    if not sum(array.size for array in arrays):
        return [put(array) for array in arrays]
    whole = put(np.concatenate([array.ravel() for array in arrays]))
    parts = torch.split(whole, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
