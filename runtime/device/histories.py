"""What requests have said so far, kept on the device that draws it: a step is launched before the host knows the ids of
the one before, so what looks at the past can only be counted there, in the order of the stream.

Only slots whose requests look at their past have a row: of `Counts` for penalties, of `Tails` for bad words of several
tokens. It is taken at admission and given back at the slot's next; older steps that still name it are earlier in the
stream. Nothing here waits for the device or depends on a value in its shapes. Knows no logits and no sampling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device.put import Put

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
FIRST = 4  # rows of the first allocation; twice as many each time they run out
NOTHING = -1  # in a tail that is longer than the output


def bytes_per_history(vocab: int) -> int:
    """Of one request with penalties. While a pool grows, its old rows, at most half as many as the new, stand too."""
    return 4 * vocab


class Pool:
    """Rows of one tensor for those of `num_slots` slots that need one; `row` int64[slots] says which, -1: none."""

    def __init__(self, num_slots: int, width: int, empty: int, dtype: torch.dtype, device: str) -> None:
        self.row = np.full(num_slots, -1, np.int64)
        self.empty = empty
        self.rows = torch.empty((0, width), dtype=dtype, device=device)  # [rows, width]
        self._free = list(range(num_slots))[::-1]

    def give_back(self, slot: int) -> None:
        if self.row[slot] >= 0:
            self._free.append(int(self.row[slot]))
            self.row[slot] = -1

    def take(self, slot: int, width: int = 0) -> Tensor:
        """A row for a slot without one, emptied; all rows are at least `width` wide from now on, filled on the left."""
        row = self.row[slot] = self._free.pop()
        self._grow(int(row) + 1, width)
        return self.rows[int(row)].fill_(self.empty)

    def _grow(self, rows: int, width: int) -> None:
        old, (has_rows, has_width) = self.rows, self.rows.shape
        if rows > has_rows:
            rows = min(max(FIRST, 2 * has_rows), len(self.row))
        if rows > has_rows or width > has_width:
            self.rows = old.new_full((max(rows, has_rows), max(width, has_width)), self.empty)
            self.rows[:has_rows, self.rows.shape[1] - has_width :] = old


class Counts(Pool):
    """int32[rows, vocab]: twice how often the id stands in the output, and 1 more where it stands in the prompt."""

    def __init__(self, num_slots: int, vocab: int, device: str) -> None:
        super().__init__(num_slots, vocab, 0, torch.int32, device)

    def admit(self, slot: int, num_prompt: int, ids: I32, put: Put) -> None:
        """Count the ids that are known, int32; the first `num_prompt` are the prompt."""
        row = self.take(slot)
        if len(ids):
            known = put(ids.astype(np.int64))
            row.index_fill_(0, known[:num_prompt], 1)
            self._add(row, known[num_prompt:])

    def told(self, rows: Tensor, ids: Tensor) -> None:
        """One more id in the output of each of `rows`, both int64[n]."""
        self._add(self.rows.view(-1), rows * self.rows.shape[1] + ids)

    @staticmethod
    def _add(flat: Tensor, at: Tensor) -> None:
        flat.index_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))


class Words(NamedTuple):
    """A request's bad words as arrays, those left out whose last id cannot be drawn anyway."""

    last: I64  # [W]
    before: I64  # [W, longest - 1]: what stands before it, aligned to the right, NOTHING on the left


def words(ids: tuple[tuple[int, ...], ...], vocab: int) -> Words:
    """Of sequences of at least one id each."""
    real = [word for word in ids if 0 <= word[-1] < vocab]
    before = np.full((len(real), max(map(len, real), default=1) - 1), NOTHING, np.int64)
    for at, word in enumerate(real):
        before[at, before.shape[1] - len(word) + 1 :] = word[:-1]
    return Words(np.array([word[-1] for word in real], np.int64), before)


class Tails(Pool):
    """int64[rows, width]: the last ids of the output; wide enough for the longest bad word so far, less its last id."""

    def __init__(self, num_slots: int, device: str) -> None:
        super().__init__(num_slots, 0, NOTHING, torch.int64, device)

    def admit(self, slot: int, longest: int, output: I32, put: Put) -> None:
        """`longest` ids are looked at; `output` are those that are known."""
        row = self.take(slot, longest)
        known = output[-longest:].astype(np.int64)
        if len(known):
            row[len(row) - len(known) :].copy_(put(known))

    def told(self, rows: Tensor, ids: Tensor) -> None:
        """One more id at the end of each of `rows`, both int64[n]."""
        moved = torch.cat((self.rows.index_select(0, rows)[:, 1:], ids[:, None]), 1)
        self.rows.index_copy_(0, rows, moved)

    def missing(self, rows: Tensor, before: Tensor) -> Tensor:
        """bool[W]: whether the tail in `rows`, int64[W], does not end with `before`, int64[W, n]; NOTHING is free."""
        there = self.rows.index_select(0, rows)[:, self.rows.shape[1] - before.shape[1] :]
        return ((there != before) & (before >= 0)).any(-1)
