"""The ring against a stream that lags behind: launches are numbered, and done only as far as somebody waits."""

from __future__ import annotations

import pytest

from runtime.attention.guarded_ring import GuardedRing


class Stream:
    """Copies that read their buffer when they run, which is as late as can be."""

    def __init__(self) -> None:
        self.queue: list[tuple[list[int], int]] = []  # what a copy reads, and what it must find there
        self.done = self.waits = 0

    def copy(self, buffer: list[int], value: int) -> None:
        buffer[0] = value
        self.queue.append((buffer, value))

    def reach(self, count: int) -> None:
        self.waits += count > self.done
        while self.done < count:
            buffer, value = self.queue[self.done]
            assert buffer[0] == value, "written again before it was read"
            self.done += 1


class Mark:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1

    def record(self) -> None:
        self.at = len(self.stream.queue)

    def synchronize(self) -> None:
        assert self.at >= 0, "waited for, but never recorded"
        self.stream.reach(self.at)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_no_buffer_is_written_while_its_copy_is_pending(depth: int) -> None:
    stream = Stream()
    ring = GuardedRing([[0] for _ in range(depth)], lambda: Mark(stream))
    for value in range(20):
        with ring.take() as buffer:
            stream.copy(buffer, value)
            stream.copy(buffer, value)  # as many as there are under one event
        assert stream.done == 2 * max(0, value + 1 - depth)  # waited for the oldest alone
    stream.reach(len(stream.queue))


@pytest.mark.parametrize(("depth", "waits"), [(2, 18), (4, 0), (5, 0)])
def test_a_ring_deeper_than_what_is_in_flight_never_waits(depth: int, waits: int) -> None:
    """The device is three plans behind."""
    stream = Stream()
    ring = GuardedRing([[0] for _ in range(depth)], lambda: Mark(stream))
    for value in range(20):
        with ring.take() as buffer:
            stream.copy(buffer, value)
        while len(stream.queue) - stream.done > 3:
            behind = stream.waits
            stream.reach(stream.done + 1)
            stream.waits = behind  # the device's own doing
    assert stream.waits == waits


def test_a_plan_that_fails_may_have_launched_its_copy() -> None:
    stream = Stream()
    ring = GuardedRing([[0]], lambda: Mark(stream))
    with pytest.raises(ZeroDivisionError), ring.take() as buffer:
        stream.copy(buffer, 1)
        raise ZeroDivisionError
    with ring.take() as buffer:
        stream.copy(buffer, 2)
    assert stream.done == 1
