"""Log probabilities found on a device, in the order of its stream, and read once they are copied to the host.

What they are of, and how they are told, is `runtime.logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.batch import Batch
from runtime.device.put import Put
from runtime.logprobs import of_drawn, of_prompt, pieces, prompts, widest
from runtime.sampling_on_torch import likeliest
from runtime.slot_sampling import SampleBatch
from runtime.step import Logprobs

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Told:
    """Of n tokens, w entries each."""

    packed: Tensor  # int32[n, 2w + 1]: ids, the float32 values' bits, rank; to be copied to the host
    read: Callable[[I32, F32, I32], list[Logprobs]]

    def logprobs(self, packed: I32) -> list[Logprobs]:
        """From what was copied."""
        width = packed.shape[1] // 2
        return self.read(packed[:, :width], packed[:, width:-1].view(np.float32), packed[:, -1])


def told(raw: Tensor, ids: Tensor, how: SampleBatch) -> Told:
    """Of what was drawn, int32[n], by the rows that want it, with their logits, float32[n, vocab]."""
    return Told(_as_one(*likeliest(raw, ids, *widest(how))), partial(of_drawn, how))


@torch.inference_mode()
def told_of_prompts(
    batch: Batch, vocab: NDArray[np.int64], hidden: Tensor, head: Callable[[Tensor], Tensor], put: Put
) -> list[Told]:
    """Of the prompt rows, one each, with one transfer; the arguments are those of `runtime.logprobs.of_prompts`."""
    found = []
    for prompt, slot, first in prompts(batch):
        targets = put(prompt.targets)
        parts = [
            likeliest(head(hidden[first + at.start : first + at.stop]), targets[at], prompt.top, int(vocab[slot]))
            for at in pieces(prompt)
        ]
        found.append(Told(torch.cat([_as_one(*part) for part in parts]), partial(of_prompt, prompt, slot)))
    return found


def _as_one(ids: Tensor, values: Tensor, ranks: Tensor) -> Tensor:
    return torch.cat((ids, values.view(torch.int32), ranks[:, None]), -1)
