"""Decode steps recorded once for each of some batch sizes and replayed in one launch; smaller batches are padded.

What a replay reads stands at fixed places: the step, slots, positions and reaches here, page lists in the attention.
Padding is slot 0, position 0 and page 0, which belong to no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import torch

from runtime.attention.flashinfer import GraphAttention, PagedAttention
from runtime.batch import Batch
from runtime.device.accelerator import Accelerator
from runtime.device.device_tokens import DeviceTokens
from runtime.device.put import Put
from runtime.model.llama import Llama

Tensor = torch.Tensor
FINE, COARSE = 8, 16  # between sizes, up to and beyond
MANY = 256


def graph_sizes(most: int) -> list[int]:
    """Ascending; the largest is `most`, the rows of a step at most."""
    sizes = [1, 2, 4, *range(FINE, min(most, MANY) + 1, FINE), *range(MANY + COARSE, most + 1, COARSE), most]
    return sorted({size for size in sizes if size <= most})


def size_for(sizes: list[int], rows: int) -> int | None:
    """The smallest of ascending `sizes` that holds so many rows; None where none does."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None


class DecodeGraph:
    """Steps of up to `size` decode rows. `out` [size, hidden_size] receives their normed states."""

    def __init__(
        self,
        size: int,
        gpu: Accelerator,
        model: Llama,
        attention: GraphAttention,
        tokens: DeviceTokens,
        out: Tensor,
    ) -> None:
        self.size, self.model, self.attention, self.tokens, self.out = size, model, attention, tokens, out
        self.numbers = torch.zeros((3, size), dtype=torch.int64, device=gpu.device)  # slots, positions, reaches
        self.step = torch.full((1,), -1, dtype=torch.int64, device=gpu.device)  # while recorded, of no step
        self.none = torch.zeros(0, dtype=torch.int64, device=gpu.device)
        self.replay = gpu.recorded(self._work)

    def run(self, batch: Batch, put: Put) -> Tensor:
        """The normed states of a step of decode rows, [R, hidden_size]; there until the next replay of any graph."""
        rows = batch.num_decode
        numbers = np.zeros((3, self.size), np.int64)
        numbers[:, :rows] = batch.slots, batch.positions, batch.reach
        put(numbers, self.numbers)
        put(np.array([batch.step], np.int64), self.step)
        self.attention.plan(batch, put)
        self.replay()
        return self.out[:rows]

    def _work(self) -> None:
        slots, positions, reach = self.numbers
        self.tokens.poison(self.step, self.none)
        ids = self.tokens.gather(self.step, slots, self.model.config.vocab_size)
        self.out.copy_(self.model.forward(ids.long(), positions, reach, self.attention))


def recorded(
    sizes: Iterable[int], gpu: Accelerator, model: Llama, attention: PagedAttention, tokens: DeviceTokens
) -> list[DecodeGraph]:
    """A graph of each size. The largest comes first: the others fit into its memory."""
    graphs: list[DecodeGraph] = []
    for size in sizes:
        if not graphs:
            kind = model.weights["model.norm.weight"]
            out = torch.zeros((size, model.config.hidden_size), dtype=kind.dtype, device=gpu.device)
        graphs.append(DecodeGraph(size, gpu, model, attention.graph(size), tokens, out[:size]))
    return graphs
