"""From the streams of the public socket to OpenAI's answers: whole ones, and events as they come. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ipc.async_client import AsyncStream
from ipc.errors import SidestepError
from ipc.exchange import Completion
from ipc.messages import Chunk, Logprob, ToolCall
from proc.http.errors import error_body
from proc.http.logprobs import length, of_chat, of_prompt, of_text

PING = 10.0  # seconds of silence after which a stream says that it lives
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


News = tuple[int, list[Chunk], Completion | None] | SidestepError


GOES_ON = {"finish_reason": None}


class Silence(Exception):
    """Nothing has come for a while."""


@dataclass(frozen=True)
class Form:
    """What an answer looks like: of `chat` or of completions, for one request."""

    chat: bool
    id: str
    model: str
    created: int
    include_usage: bool
    prefixes: tuple[str, ...]  # text that stands before each choice's (echo)
    began: float  # when the request was taken up here, of time.perf_counter

    @property
    def kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"

    def whole(self, answers: list[Completion], choices: int) -> bytes:
        """All choices; `choices` of them for each prompt."""
        body = self._head(self.kind) | {
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": self.usage(answers, choices),
        }
        return msgspec.json.encode(body)

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        if not self.chat:
            return self._text_choice(index, answer) | reasons(answer)
        says: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            says["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            says |= {"content": answer.text or None, "tool_calls": [tool_call(call) for call in answer.tool_calls]}
        told = {"prompt_logprobs": of_prompt(answer.prompt_logprobs)} if answer.prompt_logprobs else {}
        return {
            "index": index,
            "message": says,
            "logprobs": self._logprobs(answer.logprobs, 0),
            **told,
            **reasons(answer),
        }

    def _text_choice(self, index: int, answer: Completion) -> dict[str, Any]:
        """With `echo`, the prompt's text and log probabilities stand before the answer's."""
        prefix, tokens = self.prefixes[index], answer.logprobs
        before = answer.prompt_logprobs if prefix and tokens else None
        if before:
            logprobs: Any = of_text(before + tokens, 0, prefix[: max(0, len(prefix) - length(before))])
        else:
            logprobs = self._logprobs(tokens, len(prefix))
        told = {"prompt_logprobs": of_prompt(answer.prompt_logprobs)} if answer.prompt_logprobs else {}
        return {"index": index, "text": prefix + answer.text, "logprobs": logprobs, **told}

    def _logprobs(self, tokens: list[list[Logprob]], offset: int) -> dict[str, Any] | None:
        return None if not tokens else of_chat(tokens) if self.chat else of_text(tokens, offset)

    def opening(self, index: int) -> bytes:
        """The first event of a choice: the role, or the echoed prompt; nothing where there is neither."""
        if self.chat:
            return self.event({"index": index, "delta": {"role": "assistant", "content": ""}})
        return self._said(index, self.prefixes[index]) if self.prefixes[index] else b""

    def more(self, index: int, chunks: list[Chunk], offset: int) -> bytes:
        """What some chunks bring, in one event; nothing where they bring nothing to show.

        `offset`: characters of the choice's text before.
        """
        text = "".join(chunk.text for chunk in chunks)
        logprobs = self._logprobs([entry for chunk in chunks for entry in chunk.logprobs], offset)
        says: dict[str, Any] = {"content": text} if text else {}
        if self.chat:
            thought = "".join(chunk.reasoning for chunk in chunks)
            calls = [tool_delta(call) for chunk in chunks for call in chunk.tool_calls]
            says |= ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
        if not says and logprobs is None:
            return b""
        choice = {"index": index, "delta": says} if self.chat else {"index": index, "text": text}
        return self.event(choice | ({"logprobs": logprobs} if logprobs else {}))

    def _said(self, index: int, text: str) -> bytes:
        return self.event({"index": index, "delta": {"content": text}} if self.chat else {"index": index, "text": text})

    def end(self, index: int, answer: Completion) -> bytes:
        says: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self.event({"index": index, **says}, reasons(answer))

    def event(self, choice: dict[str, Any], ending: dict[str, Any] | None = None) -> bytes:
        before, after = self._around
        return before + msgspec.json.encode({"logprobs": None, **choice, **(ending or GOES_ON)}) + after

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        """What stands before and after the choice of every event."""
        head = msgspec.json.encode(self._head(self._chunk)).removesuffix(b"}")
        usage = b',"usage":null' if self.include_usage else b""
        return b"data: " + head + b',"choices":[', b"]" + usage + b"}\n\n"

    def closing(self, answers: list[Completion], choices: int) -> bytes:
        last = frame(self._head(self._chunk) | {"choices": [], "usage": self.usage(answers, choices)})
        return (last if self.include_usage else b"") + b"data: [DONE]\n\n"

    def usage(self, answers: list[Completion], choices: int) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        prompt = sum(answer.usage.prompt_tokens for answer in answers[::choices])
        completion = sum(answer.usage.completion_tokens for answer in answers)
        cached = sum(answer.usage.cached_tokens for answer in answers[::choices])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "times_s": self.times(answers),  # ours
        }

    def times(self, answers: list[Completion]) -> dict[str, float]:
        """Seconds by hop, of the choice that took longest; `delivered` is this process and the ways to and from it."""
        slowest = max(answers, key=lambda answer: answer.times["total"]).times
        return slowest | {"delivered": max(0.0, time.perf_counter() - self.began - slowest["total"])}

    @property
    def _chunk(self) -> str:
        return f"{self.kind}.chunk" if self.chat else self.kind

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def form(chat: bool, request_id: str, model: str, include_usage: bool, prefixes: list[str]) -> Form:
    name = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
    return Form(chat, name, model, int(time.time()), include_usage, tuple(prefixes), time.perf_counter())


def frame(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def tool_delta(call: ToolCall) -> dict[str, Any]:
    """Its id and name come once."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index} | tool_call(call)


def reasons(answer: Completion) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


class EventStream:
    """An answer as server-sent events. The headers leave with the first token, so that a refusal has its own status.

    A client that goes away ends its streams at once, unless they outlive it.
    """

    def __init__(
        self,
        streams: list[AsyncStream],
        shape: Form,
        choices: int,
        write_timeout: float,
        offset: int | None = None,
    ) -> None:
        """`offset`: output tokens already received of a stream that outlives its client; None for any other."""
        self.streams, self.form, self.choices, self.offset = streams, shape, choices, offset
        self.write_timeout = write_timeout
        self._characters = [len(prefix) for prefix in shape.prefixes]  # of each choice, where logprobs are told
        self._writing = 0.0  # since when a write has been waiting for the client; 0: none is

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(send, scope["state"]))
        watcher = asyncio.create_task(self._watch(receive, answer))
        try:
            await answer
        except asyncio.CancelledError:
            if not watcher.done():  # cancelled from outside
                raise
        finally:
            answer.cancel()
            watcher.cancel()
            await self._close()

    async def _watch(self, receive: Receive, answer: asyncio.Task[None]) -> None:
        """End the answer when the client goes away, or reads nothing for too long."""
        gone = asyncio.create_task(_disconnected(receive))
        try:
            while not gone.done() and not (self._writing and time.monotonic() - self._writing > self.write_timeout):
                await asyncio.wait({gone}, timeout=self.write_timeout / 4)
        finally:
            gone.cancel()
        await self._close()
        answer.cancel()

    async def _close(self) -> None:
        for stream in self.streams:
            await (stream.close() if self.offset is None else stream.detach())

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        self._writing = time.monotonic()  # a loop's own time asks the system for the process each time
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing = 0.0

    async def _answer(self, begin: Send, state: dict[str, Any]) -> None:
        begun, send = False, state["send"]
        try:
            async for index, chunks, answer in self._events():
                data = b""
                if not begun:
                    begun = True
                    await begin({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    if not self.offset:
                        data = b"".join(self.form.opening(n) for n in range(len(self.streams)))
                data += self._data(index, chunks, answer)
                await self._write(send, data)
        except SidestepError as error:
            if not begun:
                raise
            await self._write(send, frame(error_body(error)), more=False)
            return
        answers = [stream.result for stream in self.streams if stream.result is not None]
        if len(answers) == len(self.streams):
            state["times"] = self.form.times(answers)
            await self._write(send, self.form.closing(answers, self.choices), more=False)

    def _data(self, index: int | None, chunks: list[Chunk], answer: Completion | None) -> bytes:
        """The bytes for what has come of choice `index`; tokens that have piled up share an event."""
        if index is None:
            return b": ping\n\n"
        data = self.form.more(index, chunks, self._characters[index])
        if chunks and chunks[0].logprobs:
            self._characters[index] += sum(length(chunk.logprobs) for chunk in chunks)
        if self.offset is not None and chunks:
            self.offset = chunks[-1].offset + len(chunks[-1].ids)
            data = f"id: {self.streams[index].key}:{self.offset}\n".encode() + (data or b": nothing to show\n\n")
        return data if answer is None else data + self.form.end(index, answer)

    async def _events(self) -> AsyncIterator[tuple[int | None, list[Chunk], Completion | None]]:
        """(choice, what has come of it, the whole where that was the end) until all have ended; None in a silence."""
        if len(self.streams) == 1:
            stream = self.streams[0]
            while stream.result is None and not stream.closed:
                try:
                    chunks = await stream.take(PING, Silence())
                except Silence:
                    yield None, [], None
                    continue
                yield 0, chunks, stream.result
            return
        news: asyncio.Queue[News] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(index, stream, news)) for index, stream in enumerate(self.streams)]
        try:
            while not all(task.done() for task in tasks) or not news.empty():
                try:
                    event = await asyncio.wait_for(news.get(), PING)
                except asyncio.TimeoutError:
                    yield None, [], None
                    continue
                if isinstance(event, SidestepError):
                    raise event
                yield event
        finally:
            for task in tasks:
                task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pump(index: int, stream: AsyncStream, news: asyncio.Queue[News]) -> None:
    try:
        while stream.result is None and not stream.closed:
            with contextlib.suppress(Silence):
                chunks = await stream.take(PING, Silence())
                news.put_nowait((index, chunks, stream.result))
    except SidestepError as error:
        news.put_nowait(error)
