"""The client without I/O: which messages to send, and what the replies mean. Both clients are thin shells around it.

A request's events wait in its own queue until it is read, so streams may be read in any order. Chunks carry the offset
of their first token: what was seen already is dropped, a gap is an error.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ipc.errors import InternalError, InvalidRequest, ProcessDied, SidestepError, from_wire
from ipc.histogram import total
from ipc.messages import (
    Abort,
    Accepted,
    Attach,
    Chunk,
    Chunks,
    Detach,
    Done,
    Error,
    FromClient,
    Generate,
    Hello,
    Logprob,
    MetricsReply,
    Ping,
    ToClient,
    ToolCall,
    Usage,
    Welcome,
    decode_to_client,
    encode,
)
from ipc.sampling_params import SamplingParams

SILENCE = 2.0  # seconds without a word before the server is asked whether it is there
DEAD = 10.0  # seconds without a word, from that question on, after which it is given up
GENERATE_FIELDS = {
    "output_ids",
    "model",
    "priority",
    "timeout_ms",
    "detach",
    "return_prompt_ids",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "separate_reasoning",
}


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | tool_calls
    stop_reason: int | str | None
    usage: Usage
    seed: int
    times: dict[str, float]
    prompt_token_ids: list[int] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[list[Logprob]] = field(default_factory=list)  # for each token: itself, then the most likely ids
    prompt_logprobs: list[list[Logprob]] | None = None


@dataclass
class Pending:
    """One request under way: what has arrived and has not been read."""

    label: str
    events: deque[Chunk | Any] = field(default_factory=deque)
    error: SidestepError | None = None
    received: int = 0  # output tokens
    key: str = ""  # by which it can be attached again
    over: bool = False
    changed: Callable[[], object] = (
        bool  # called when an event or the end has come; for shells that wait without a loop
    )


class Exchange:
    """The talk with one tokenizer. `now` is any clock in seconds."""

    def __init__(self, now: float) -> None:
        self.welcome: Welcome | None = None
        self.greeting = Pending("")  # over once the server has answered the hello
        self.pending: dict[str, Pending] = {}
        self.heard = now
        self.asked: float | None = None  # since when a question whether the server is there has had no answer
        self._numbers = itertools.count()

    def hello(self) -> bytes:
        return encode(Hello())

    def label(self) -> str:
        return f"r{next(self._numbers)}"

    def begin(self, message: FromClient) -> tuple[Pending, bytes]:
        """Register a message that has an `id` and is answered; returns where its answer will be, and the frame."""
        label: str = message.id  # type: ignore[union-attr]
        if label in self.pending:
            raise InvalidRequest(f"a request {label!r} is under way already", "id")
        frame = encode(message)
        pending = Pending(label)
        if isinstance(message, Generate):
            pending.received = len(message.output_ids)
        elif isinstance(message, Attach):
            pending.received, pending.key = message.offset, message.key
        self.pending[label] = pending
        return pending, frame

    def abort(self, pending: Pending) -> bytes | None:
        """The frame that ends a request nobody wants any more; None when it is over already."""
        if pending.over:
            return None
        self.forget(pending)
        return encode(Abort(pending.label))

    def detach(self, pending: Pending) -> bytes | None:
        """The frame that leaves a request to itself; None when it is over already."""
        if pending.over:
            return None
        self.forget(pending)
        return encode(Detach(pending.label))

    def forget(self, pending: Pending) -> None:
        pending.over = True
        self.pending.pop(pending.label, None)
        pending.changed()

    def feed(self, frame: bytes, now: float) -> None:
        """Take a reply. Replies nobody waits for are dropped; one that cannot be read fails what is under way."""
        self.heard, self.asked = now, None
        try:
            message = decode_to_client(frame)
        except msgspec.MsgspecError as error:
            self.fail(InternalError(f"a reply cannot be read: {error}"))
            return
        if isinstance(message, Welcome):
            self.welcome = message
            self.forget(self.greeting)
        elif isinstance(message, Accepted):
            if message.id in self.pending:
                self.pending[message.id].key = message.key
        elif isinstance(message, Chunks):
            for chunk in message.items:
                self._chunk(chunk)
        elif isinstance(message, Error):
            self._error(message)
        else:
            self._last(message)

    def tick(self, now: float) -> bytes | None:
        """What to send when nothing has come for a while. Fails what is under way when that lasts too long."""
        if not self.pending:
            return None
        if self.asked is None and now - self.heard > SILENCE:
            self.asked = now
            return encode(Ping("ping"))
        if self.asked is not None and now - self.asked > DEAD:
            self.fail(ProcessDied(f"the server has not answered for {now - self.asked:.0f} s"))
        return None

    def fail(self, error: SidestepError) -> None:
        for pending in list(self.pending.values()):
            pending.error = error
            self.forget(pending)

    def _chunk(self, chunk: Chunk) -> None:
        pending = self.pending.get(chunk.id)
        if pending is None or (chunk.offset + len(chunk.ids) <= pending.received and chunk.ids):
            return
        if chunk.offset > pending.received:
            pending.error = InternalError(f"tokens {pending.received} to {chunk.offset - 1} were lost")
            self.forget(pending)
            return
        pending.received = chunk.offset + len(chunk.ids)
        pending.events.append(chunk)
        pending.changed()

    def _error(self, message: Error) -> None:
        error = from_wire(message.code, message.message, message.param)
        if message.id is None:
            self.fail(error)
        elif message.id in self.pending:
            self.pending[message.id].error = error
            self.forget(self.pending[message.id])

    def _last(self, message: ToClient) -> None:
        pending = self.pending.get(message.id)  # type: ignore[union-attr, arg-type]
        if pending is not None:
            pending.events.append(message)
            self.forget(pending)


def completion(done: Done, chunks: Sequence[Chunk] | None = None) -> Completion:
    """The whole answer of a last word; with `chunks` where it was streamed."""
    calls = done.tool_calls
    if chunks is not None:
        calls = joined_calls([call for chunk in chunks for call in chunk.tool_calls])
    parts = chunks or []
    return Completion(
        done.text if chunks is None else "".join(part.text for part in parts),
        done.ids if chunks is None else [token for part in parts for token in part.ids],
        done.finish_reason,
        done.stop_reason,
        done.usage,
        done.seed,
        done.times,
        done.prompt_ids,
        done.reasoning if chunks is None else "".join(part.reasoning for part in parts),
        calls,
        done.logprobs if chunks is None else [entry for part in parts for entry in part.logprobs],
        done.prompt_logprobs,
    )


def joined_calls(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """Pieces of calls as whole ones."""
    whole: dict[int, ToolCall] = {}
    for piece in pieces:
        known = whole.get(piece.index, ToolCall(piece.index))
        arguments = known.arguments + piece.arguments
        whole[piece.index] = ToolCall(piece.index, known.id or piece.id, known.name or piece.name, arguments)
    return list(whole.values())


def generate_message(
    label: str,
    stream: bool,
    prompt: str | list[int] | None,
    messages: list[dict[str, Any]] | None,
    wishes: dict[str, Any],
) -> Generate:
    """A `Generate` from keyword arguments: sampling fields and request fields together.

    Raises `InvalidRequest` that names an unknown field or one of the wrong type.
    """
    fields = {name: wishes.pop(name) for name in list(wishes) if name in GENERATE_FIELDS}
    if isinstance(wishes.get("stop"), str):
        wishes["stop"] = [wishes["stop"]]
    sampling = wishes.pop("sampling_params", None)
    if sampling is not None and wishes:
        raise InvalidRequest(f"{min(wishes)} beside sampling_params: give one or the other", min(wishes))
    try:
        sampling = sampling or msgspec.convert(wishes, SamplingParams)
    except msgspec.ValidationError as error:
        name = next((name for name in wishes if f"`{name}`" in str(error) or f"$.{name}" in str(error)), None)
        raise InvalidRequest(str(error), name) from None
    sampling.check()
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    return Generate(label, text, messages, ids, sampling=sampling, stream=stream, **fields)


def merged(replies: list[MetricsReply]) -> MetricsReply:
    """The metrics of several tokenizers as one: each knows all schedulers' figures, and its own requests."""
    mine = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    figures = dict(replies[0].figures)
    for name in figures:
        if name.startswith(mine):
            figures[name] = sum(reply.figures[name] for reply in replies)
    own = [name for name in replies[0].histograms if name not in ("request_queue_time_seconds", "step_plan_seconds")]
    sums = total([{name: reply.histograms[name] for name in own} for reply in replies])
    return MetricsReply(replies[0].id, figures, replies[0].histograms | sums)
