"""Buffers taken in turn, each guarded by an event: what a device may still read is not written again.

flashinfer plans into page-locked memory and copies it to the device behind the host's back. A host that launches ahead
plans the next step before that copy has run, so every plan gets memory of its own. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

Buffer = TypeVar("Buffer")


class Event(Protocol):
    """Of `runtime.device.accelerator.Event`, what is needed here."""

    def record(self) -> None:
        """It stands for all that is in the stream now."""

    def synchronize(self) -> None:
        """Sleep until all of that is done."""


class GuardedRing(Generic[Buffer]):
    """As many buffers as copies may be outstanding; with one less it waits. For one thread and one stream."""

    def __init__(self, buffers: Sequence[Buffer], event: Callable[[], Event]) -> None:
        self.buffers = buffers
        self.events = [event() for _ in buffers]
        self.taken = 0

    @contextmanager
    def take(self) -> Iterator[Buffer]:
        """The next buffer, once the device is done with what was launched when it was last given back."""
        at = self.taken % len(self.buffers)
        if self.taken >= len(self.buffers):
            self.events[at].synchronize()
        self.taken += 1
        try:
            yield self.buffers[at]
        finally:
            self.events[at].record()
