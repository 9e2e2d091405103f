"""A tokenizer's turn is bounded in number and in time, so that a burst of requests holds up nobody's word."""

from __future__ import annotations

import pytest

from proc import tokenizer
from proc.tokenizer import LONGEST_TURN, TURN, TokenizerLoop


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Burst:
    """A public socket on which there is always one more message."""

    def receive(self) -> tuple[bytes, bytes]:
        return b"client", b"message"


@pytest.mark.parametrize(("seconds", "taken"), [(0.0, TURN), (LONGEST_TURN * 0.4, 3), (9.0, 1)])
def test_a_burst_is_taken_in_turns(monkeypatch: pytest.MonkeyPatch, seconds: float, taken: int) -> None:
    clock, answered = Clock(), list[bytes]()
    loop = object.__new__(TokenizerLoop)
    loop.public = Burst()  # type: ignore[assignment]

    def answer(client: bytes, frame: bytes) -> None:
        answered.append(frame)
        clock.now += seconds

    monkeypatch.setattr(loop, "answer", answer)
    monkeypatch.setattr(tokenizer, "time", clock)
    loop.take_requests(clock.now + LONGEST_TURN)
    assert len(answered) == taken
