"""A TokenTable's arrays as tensors, and what a device does with them in the order of its stream.

Nothing here waits for the device, asks it anything or depends on a value in its shapes, so a CUDA graph may hold it;
the step is a tensor for the same reason. A device cannot raise: an id that is not there counts into the step's error
word, a harmless one is taken instead, and whoever reads the step raises (`ipc.token_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceTokens:
    """The arrays share the table's memory. All indices are int64, `step` is int64[1].

    A step calls `poison`, `gather`, `publish`; until it publishes, no slot that it names has an id. Rows that only pad
    it name slot 0 and a row that does not sample.
    """

    stamp: Tensor  # int64[ring]
    error: Tensor  # int32[ring]
    count: Tensor  # int32[ring, rows]
    ids: Tensor  # int32[ring, rows, width]
    next: Tensor  # int32[slots]

    @classmethod
    def over(cls, arrays: Mapping[str, Any], tensor: Callable[[Any], Tensor] = torch.as_tensor) -> DeviceTokens:
        """`arrays` by the fields' names; `tensor` makes one over their memory, without a copy."""
        return cls(**{name: tensor(array) for name, array in arrays.items()})

    def poison(self, step: Tensor, slots: Tensor) -> None:
        """Make the ring entry the step's, empty; `slots` of the rows that bring their ids along have no next one."""
        entry = step % len(self.stamp)
        self.ids.index_fill_(0, entry, -1)
        self.count.index_fill_(0, entry, 0)
        self.error.index_fill_(0, entry, 0)
        self.stamp.index_copy_(0, entry, step)
        self._take(slots)

    def gather(self, step: Tensor, slots: Tensor, vocab: int) -> Tensor:
        """int32[S]: the next ids of decode rows, taken out: each is read once. Clamped to the `vocab` ids there are."""
        found = self.next.index_select(0, slots)
        ids = found.clamp(0, vocab - 1)
        self.error.index_add_(0, step % len(self.error), (ids != found).sum(0, keepdim=True, dtype=torch.int32))
        self._take(slots)
        return ids

    def publish(self, step: Tensor, rows: Tensor, slots: Tensor, ids: Tensor) -> None:
        """Write `ids`, int32[S, k] with k <= width, for `rows`, and the last of each row to `next[slots]`."""
        entry, tokens = step % len(self.stamp), ids.shape[1]
        self.ids[:, :, :tokens].index_put_((entry, rows), ids)
        self.count.index_put_((entry, rows), torch.full_like(rows, tokens, dtype=torch.int32))
        self.next.index_copy_(0, slots, ids[:, -1])
        self.next[0].zero_()  # padding's

    def _take(self, slots: Tensor) -> None:
        self.next.index_fill_(0, slots, -1)
        self.next[0].zero_()  # padding's
