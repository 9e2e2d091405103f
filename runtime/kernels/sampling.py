"""Sampling on the C kernels (`csrc/sampling.h`); `runtime.sampling_on_torch` is the reference."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.device.base import MaskSet
from runtime.kernels.library import Draws, Kernels, Penalty, Told
from runtime.sampling_ops import LEAST
from runtime.slot_sampling import Edits, SampleBatch

Tensor = torch.Tensor
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@dataclass
class KernelOps:
    """`runtime.sampling_ops.SamplingOps` in `threads` threads."""

    kernels: Kernels
    threads: int
    scratch: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def mask(self, logits: Tensor, masks: MaskSet) -> None:
        rows, bits = np.ascontiguousarray(masks.rows, np.int64), np.ascontiguousarray(masks.bits)
        self.kernels.mask(
            *(_at(logits), logits.shape[1], rows.ctypes.data, len(rows)),
            *(bits.ctypes.data, bits.shape[1], self.threads),
        )

    def penalise(self, logits: Tensor, rows: list[tuple[int, Edits]]) -> None:
        parts = [_penalty(row, edits) for row, edits in rows if edits.history is not None]
        self.kernels.penalise(_at(logits), logits.shape[1], (Penalty * len(parts))(*parts), len(parts), self.threads)

    def draw(self, logits: Tensor, how: SampleBatch) -> I32:
        rows, size = logits.shape
        ids = np.empty(rows, np.int32)
        parts = (how.temperature, how.top_k, how.top_p, how.min_p, how.uniform)
        arrays = [np.ascontiguousarray(part) for part in parts]
        draws = Draws(rows, size, _at(logits), *(array.ctypes.data for array in arrays), ids.ctypes.data)
        self.kernels.draw(byref(draws), self._room(size), self.threads)
        return ids

    def told(self, logits: Tensor, ids: I32, top: int, vocab: int) -> tuple[I32, F32, I32]:
        rows, size = logits.shape
        real = vocab or size
        top = min(top, real)
        shown, values = np.empty((rows, 1 + top), np.int32), np.empty((rows, 1 + top), np.float32)
        ranks = np.empty(rows, np.int32)
        shown[:, 0] = ids
        outputs = (array.ctypes.data for array in (shown, values, ranks))
        told = Told(rows, size, real, top, LEAST, _at(logits), *outputs)
        self.kernels.tell(byref(told), self._room(size), self.threads)
        return shown, values, ranks

    def _room(self, size: int) -> int:
        """Address of what all threads need for rows of `size`; kept from step to step."""
        needed = self.kernels.choice_size(size) * self.threads + 64
        if self.scratch.nbytes < needed:
            self.scratch = torch.empty(needed, dtype=torch.uint8)
        return -(-self.scratch.data_ptr() // 64) * 64


def _at(logits: Tensor) -> int:
    assert logits.is_contiguous() and logits.dtype == torch.float32
    return logits.data_ptr()


def _penalty(row: int, edits: Edits) -> Penalty:
    history, wish = edits.history, edits.sampling
    assert history is not None
    arrays = (history.ids.ctypes.data, history.counts.ctypes.data)
    weights = (wish.repetition_penalty, wish.frequency_penalty, wish.presence_penalty)
    return Penalty(row, len(history.ids), *arrays, *weights)
