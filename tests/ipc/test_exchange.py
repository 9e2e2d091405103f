"""The client without I/O: overlaps dropped, gaps told, silence noticed, by a clock turned by hand."""

from __future__ import annotations

import pytest

from ipc.errors import InternalError, InvalidRequest, ProcessDied, PromptTooLong
from ipc.exchange import DEAD, SILENCE, Exchange, Pending, generate_message
from ipc.messages import Chunk, Chunks, Done, Error, Generate, Ping, Usage, decode_from_client, encode

LAST = Done(id="r0", finish_reason="stop", usage=Usage(1, 3, 0), seed=1, times={})


def begun(**fields: object) -> tuple[Exchange, Pending]:
    exchange = Exchange(now=0.0)
    pending, _ = exchange.begin(Generate(exchange.label(), "x", **fields))  # type: ignore[arg-type]
    return exchange, pending


def chunk(offset: int, *ids: int) -> bytes:
    return encode(Chunks([Chunk("r0", offset, "t" * len(ids), list(ids))]))


def test_an_answer_in_order() -> None:
    exchange, pending = begun()
    for frame in (chunk(0, 5), chunk(1, 6, 7), encode(LAST)):
        exchange.feed(frame, 1.0)
    assert [event.ids for event in list(pending.events)[:2]] == [[5], [6, 7]]
    assert pending.events[-1] == LAST and pending.over and not exchange.pending


def test_what_is_repeated_is_dropped() -> None:
    exchange, pending = begun()
    for frame in (chunk(0, 5), chunk(0, 5), chunk(1, 6)):
        exchange.feed(frame, 1.0)
    assert [event.ids for event in pending.events] == [[5], [6]]


def test_a_gap_is_an_error() -> None:
    exchange, pending = begun()
    exchange.feed(chunk(0, 5), 1.0)
    exchange.feed(chunk(3, 8), 1.0)
    assert isinstance(pending.error, InternalError) and "tokens 1 to 2 were lost" in str(pending.error)


def test_a_resumed_answer_counts_on() -> None:
    exchange, pending = begun(output_ids=[1, 2])
    exchange.feed(chunk(2, 8), 1.0)
    assert [event.ids for event in pending.events] == [[8]] and pending.error is None


def test_errors_go_to_their_request_and_unreadable_replies_to_all() -> None:
    exchange, first = begun()
    second, _ = exchange.begin(Generate("other", "x"))
    exchange.feed(encode(Error("prompt_too_long", "words", "r0", "prompt")), 1.0)
    assert isinstance(first.error, PromptTooLong) and first.error.param == "prompt" and second.error is None
    exchange.feed(b"\xc1", 1.0)
    assert isinstance(second.error, InternalError)


def test_silence_is_asked_about_and_then_taken_for_death() -> None:
    exchange, pending = begun()
    assert exchange.tick(SILENCE / 2) is None
    frame = exchange.tick(SILENCE + 0.1)
    assert frame is not None and isinstance(decode_from_client(frame), Ping)
    assert exchange.tick(SILENCE + 0.2) is None  # asked once
    exchange.feed(encode(Chunks([])), DEAD)
    assert exchange.tick(DEAD + 0.1) is None and pending.error is None
    assert exchange.tick(2 * DEAD) is not None  # asked again
    assert exchange.tick(3 * DEAD) is None and pending.error is None
    exchange.tick(3 * DEAD + 0.1)
    assert isinstance(pending.error, ProcessDied)


def test_an_idle_time_is_no_part_of_the_silence() -> None:
    exchange = Exchange(now=0.0)
    pending, _ = exchange.begin(Generate("r0", "x"))
    exchange.tick(1000.0)
    exchange.tick(1000.1 + DEAD)
    assert isinstance(pending.error, ProcessDied) and f"not answered for {DEAD:.0f} s" in str(pending.error)


def test_a_request_after_a_long_idle_time_is_not_taken_for_lost() -> None:
    exchange = Exchange(now=0.0)
    pending, _ = exchange.begin(Generate("r0", "x"))
    assert exchange.tick(1000.0) is not None and pending.error is None  # it asks first
    exchange.feed(encode(Chunks([])), 1000.1)
    assert exchange.tick(1000.2) is None and pending.error is None


def test_an_idle_client_asks_nothing() -> None:
    assert Exchange(now=0.0).tick(1000.0) is None


def test_replies_nobody_waits_for_are_dropped() -> None:
    exchange, pending = begun()
    assert exchange.abort(pending) is not None
    exchange.feed(chunk(0, 5), 1.0)
    exchange.feed(encode(LAST), 1.0)
    assert not pending.events and exchange.abort(pending) is None


def test_a_label_is_used_once_at_a_time() -> None:
    exchange, _ = begun()
    with pytest.raises(InvalidRequest, match="under way"):
        exchange.begin(Generate("r0", "x"))


def test_keyword_arguments_become_a_message() -> None:
    message = generate_message("1", True, [1, 2], None, {"stop": "x", "temperature": 0.5, "priority": 3})
    assert (message.prompt, message.prompt_ids, message.priority) == (None, [1, 2], 3)
    assert (message.sampling.stop, message.sampling.temperature) == (["x"], 0.5)
    for wishes, param in (({"nonsense": 1}, "nonsense"), ({"top_p": "high"}, "top_p"), ({"top_p": 3.0}, "top_p")):
        with pytest.raises(InvalidRequest) as caught:
            generate_message("1", True, "x", None, dict(wishes))
        assert caught.value.param == param
