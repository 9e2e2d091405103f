"""An event stream without a server: a silence is a comment, tokens that pile up share an event, errors end it badly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ipc.errors import ProcessDied
from ipc.exchange import Completion
from ipc.messages import Chunk, Usage
from proc.http.answers import EventStream, form


class Stream:
    """Stands for `AsyncStream`: what it is given comes in turn; None is a silence."""

    key = "0-1-x"

    def __init__(self, *news: list[Chunk] | Exception | None) -> None:
        self.news = list(news)
        self.result: Completion | None = None
        self.closed = False
        self.left = ""

    async def take(self, timeout: float, late: Exception) -> list[Chunk]:
        item = self.news.pop(0)
        if item is None:
            raise late
        if isinstance(item, Exception):
            raise item
        if not self.news:
            times = {"total": 0.5}
            self.result = Completion("", [], "stop", None, Usage(3, 4, 1), 0, times)
        return item

    async def close(self) -> None:
        self.left = self.left or "closed"

    async def detach(self) -> None:
        self.left = self.left or "detached"


async def forever() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def play(*streams: Stream, offset: int | None = None) -> tuple[list[dict[str, Any]], bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    shape = form(True, "id", "m", True, [""] * len(streams))
    state: dict[str, Any] = {"send": send}  # as the guard has it
    made = EventStream(list(streams), shape, 1, 60.0, offset)  # type: ignore[arg-type]
    asyncio.run(made({"state": state}, forever, send))
    return sent, b"".join(message.get("body", b"") for message in sent)


def chunk(offset: int, text: str) -> Chunk:
    return Chunk("r", offset, text, [7])


@pytest.mark.parametrize("count", [1, 2])
def test_a_silence_is_a_comment_and_piled_up_tokens_share_an_event(count: int) -> None:
    streams = [Stream([chunk(0, "a")], None, [chunk(1, "b"), chunk(2, "c")]) for _ in range(count)]
    sent, body = play(*streams)
    assert sent[0]["status"] == 200 and body.endswith(b"data: [DONE]\n\n")
    assert (b": ping\n\n" in body) == (count == 1)  # one of several may be silent
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    texts = [one["delta"].get("content") for event in events for one in event["choices"] if one["index"] == count - 1]
    assert texts == ["", "a", "bc", None]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4 * count
    assert events[-1]["usage"]["times_s"]["delivered"] == 0


def test_an_error_before_the_first_token_is_raised_and_one_after_it_is_told() -> None:
    with pytest.raises(ProcessDied):
        play(Stream(ProcessDied("gone")))
    _, body = play(Stream([chunk(0, "a")], ProcessDied("gone")))
    assert b'"code":"process_died"' in body and b"[DONE]" not in body


def test_a_stream_that_outlives_its_client_is_left_and_not_ended() -> None:
    kept, ended = Stream([chunk(4, "e")]), Stream([chunk(0, "a")])
    _, body = play(kept, offset=4)
    assert body.startswith(b"id: 0-1-x:5\n") and b"assistant" not in body and kept.left == "detached"
    play(ended)
    assert ended.left == "closed"
