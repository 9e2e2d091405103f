"""What the ranks of a model do together. Members: `Alone`, and `Together` over torch.distributed (gloo, nccl on GPUs).

Every rank makes the same calls in the same order, on tensors of the same shapes, and gets the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from runtime.model.sharding import ALONE, Rank

Tensor = torch.Tensor
LOOPBACK = "lo"
LONGEST = timedelta(hours=1)  # for ranks that hang; one that dies is noticed at once, a start has its own limit


class PeerLost(RuntimeError):
    """Another rank has gone or hangs; what ended it is not known here."""


class Collective(Protocol):
    rank: Rank

    def sum(self, part: Tensor) -> Tensor:
        """Of every rank's tensor; `part` may be overwritten. Raises `PeerLost`, as the others do."""

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's [S, P], side by side: [S, size * P]."""

    def least(self, number: int) -> int:
        """Of every rank's number."""


class Alone:
    """The only rank."""

    rank = ALONE

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part

    def least(self, number: int) -> int:
        return number


class Together:
    """One rank of several, in a process of its own, with whose end it leaves the others.

    They meet through the file `meeting`, which only they know, and exchange tensors on `device`.
    """

    def __init__(self, rank: Rank, meeting: str, backend: str = "gloo", device: torch.device | None = None) -> None:
        self.rank, self.device = rank, device
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK  # gloo would listen where the machine's name leads
        with _others():
            store = dist.FileStore(meeting, rank.size)  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=LONGEST, rank=rank.index, world_size=rank.size, store=store)

    def sum(self, part: Tensor) -> Tensor:
        here = part if self.device is None else part.to(self.device)
        with _others():
            dist.all_reduce(here)
        return here.to(part.device)

    def gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.rank.size)]
        with _others():
            dist.all_gather(parts, part)
        return torch.cat(parts, -1)

    def least(self, number: int) -> int:
        least = torch.tensor(number, device=self.device)
        with _others():
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


@contextmanager
def _others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"another rank is lost: {str(error).splitlines()[0]}") from None
