"""What a step's sampling asks of the machine. Members: torch (`runtime.sampling_on_torch`, the reference) and our C
kernels (`runtime.kernels.sampling`).

Each filter is a cut-off: the smallest logit that stays. So what can be drawn depends on the row alone, and ids with
equal logits share their fate. A token is the inverse of the cumulative distribution, in the order of ids, at the row's
one random number: the same number draws the same token whatever else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import MaskSet
from runtime.slot_sampling import Edits, SampleBatch

if TYPE_CHECKING:
    from torch import Tensor

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
LEAST = -9999.0  # a log probability below is told as this: JSON knows no infinity


class SamplingOps(Protocol):
    """`logits` are contiguous float32[S, vocab]."""

    def mask(self, logits: Tensor, masks: MaskSet) -> None:
        """Leave each masked row only the ids whose bit is set, in place."""

    def penalise(self, logits: Tensor, rows: list[tuple[int, Edits]]) -> None:
        """Repetition, frequency and presence penalties of `rows`, in place, touching only ids that have occurred.

        Repetition (Keskar et al. 2019) counts prompt and output, the other two (OpenAI) the output alone.
        """

    def draw(self, logits: Tensor, how: SampleBatch) -> I32:
        """int32[S]: greedy, or by temperature, min_p, top_k and top_p; its best id for a row without a distribution."""

    def told(self, logits: Tensor, ids: I32, top: int, vocab: int) -> tuple[I32, F32, I32]:
        """For int32[S]: ids and log probabilities [S, 1 + top], the token itself first, and ranks [S], from 1.

        The best ones are of the first `vocab` ids (0: of all); fewer columns where there are fewer.
        """
