"""A step's tokens from its logits: what the requests change in them, then the draw. Knows no slot and no seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.device.base import MaskSet
from runtime.logits import Processor, edit
from runtime.sampling_ops import SamplingOps
from runtime.slot_sampling import SampleBatch


def sample(
    logits: Tensor, how: SampleBatch, masks: MaskSet | None, processors: Mapping[str, Processor], ops: SamplingOps
) -> NDArray[np.int32]:
    """float32[S, vocab] to int32[S]; `logits` are overwritten. The histories are told what was drawn."""
    edit(logits, how, masks, processors, ops)
    drawn = ops.draw(logits, how)
    how.drawn(drawn)
    return drawn
