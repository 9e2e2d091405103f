"""The ids of one request as its sampling needs them: how often each has occurred, and the output in order.

Kept by the worker, only for requests that ask for penalties, bad words or processors, and fed by the sampler itself
with what it has just drawn, so it is never stale at any overlap depth. Knows no logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class History:
    """`ids` int32: prompt and known output; the first `num_prompt` are the prompt."""

    def __init__(self, ids: I32, num_prompt: int) -> None:
        self.prompt = ids[:num_prompt].copy()
        self.output: list[int] = []
        distinct = np.unique(self.prompt)
        self._at: dict[int, int] = {token: at for at, token in enumerate(distinct.tolist())}
        self._ids = np.concatenate((distinct, np.zeros(64, np.int32)))
        self._counts = np.zeros(len(self._ids), np.int32)
        for token in ids[num_prompt:].tolist():
            self.append(token)

    @property
    def ids(self) -> I32:
        """int32[D], each id that has occurred, once; those of the prompt first."""
        return self._ids[: len(self._at)]

    @property
    def counts(self) -> I32:
        """int32[D]: how often each of `ids` stands in the output."""
        return self._counts[: len(self._at)]

    def append(self, token: int) -> None:
        self.output.append(token)
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._ids, self._counts = (np.concatenate((a, np.zeros_like(a))) for a in (self._ids, self._counts))
        self._ids[at] = token
        self._counts[at] += 1

    def ends_with(self, ids: tuple[int, ...]) -> bool:
        """Whether the output's last tokens are these; true of none."""
        return not ids or tuple(self.output[-len(ids) :]) == ids
