"""The reference of coded inputs: what the kernels see of a coded layer's inputs."""

from __future__ import annotations

from torch import Tensor

from runtime.model.quantized import GROUP


def as_coded(x: Tensor) -> Tensor:
    """float32[..., k], each group of GROUP rounded to a 127th of its largest."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    turn = (127 / most).masked_fill(most == 0, 0)
    return ((groups * turn).round() * (most / 127)).flatten(-2)
