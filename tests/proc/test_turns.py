"""A tokenizer starts with its last replica; its turn is bounded, so that a burst of requests holds up nobody's word."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from ipc.endpoints import address
from ipc.internal import Alive, ReplicaReady
from ipc.sockets import Sender
from proc import tokenizer
from proc.role import ProcessSpec, Role
from proc.settings import Settings
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


def test_a_grammar_process_may_say_that_it_lives_before_all_replicas_are_there(tmp_path: Path) -> None:
    settings = Settings(device="sim", startup_timeout=1.0)
    spec = ProcessSpec([Role("tokenizer", 0)], settings, str(tmp_path), "", [1, 2], [], 1, -1)
    words = [ReplicaReady(0, 64, 256, 9, 16, "sim"), Alive(0), Alive(0), ReplicaReady(1, 48, 256, 9, 16, "sim")]
    with (
        closing(TokenizerLoop(spec, 0)) as loop,
        closing(Sender[ReplicaReady | Alive](address(str(tmp_path), "tokenizer", 0, "in"))) as sender,
    ):
        for word in words[:3]:
            sender.send(word)
        with pytest.raises(TimeoutError, match="not ready within 1 s"):
            loop.start()
        sender.send(words[3])
        loop.start()
        assert loop.max_model_len == 48
