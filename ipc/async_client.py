"""The client for asyncio code: the twin of `ipc.client.Client`, over the same exchange."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from ipc.client import connect, find_address
from ipc.errors import CannotConnect, InternalError, TimedOut
from ipc.exchange import SILENCE, Completion, Exchange, Pending, completion, generate_message, merged
from ipc.messages import (
    MAX_FRAME,
    Attach,
    Chunk,
    Detokenize,
    Detokenized,
    Done,
    FromClient,
    Metrics,
    MetricsReply,
    ModelList,
    Models,
    Status,
    StatusReply,
    Tokenize,
    Tokenized,
    Trace,
    TraceReply,
    Track,
)

R = TypeVar("R")


@dataclass(eq=False)
class Waiter:
    """Somebody who waits for an event until `due`, of the loop's clock."""

    future: asyncio.Future[None]
    due: float
    late: Exception

    def settle(self, error: Exception | None = None) -> None:
        if not self.future.done():
            self.future.set_exception(error) if error else self.future.set_result(None)


class AsyncLine:
    """One connection, to one tokenizer, with a task that takes what comes and wakes those who wait."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.RCVHWM, 100_000)
        self.socket.set(zmq.SNDHWM, 0)  # a send that waits could be cancelled, and a request or its abort with it
        self.socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        connect(self.socket, address)
        self.address = address
        self.exchange = Exchange(time.monotonic())
        self.loop = asyncio.get_running_loop()
        self.waiting: set[Waiter] = set()
        self.alarm: asyncio.TimerHandle | None = None  # for the first of those who wait
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            await self.socket.send(self.exchange.hello())
            while True:
                if await self.socket.poll(int(SILENCE * 500)):
                    self.exchange.feed(await self.socket.recv(), time.monotonic())
                ping = self.exchange.tick(time.monotonic())
                if ping is not None:
                    await self.socket.send(ping)
        finally:
            self.exchange.fail(CannotConnect("the client is closed"))

    async def changed(self, pending: Pending, timeout: float, late: Exception) -> None:
        """Until something of `pending` has come. Raises `late` after `timeout` seconds."""
        waiter = Waiter(self.loop.create_future(), self.loop.time() + timeout, late)
        pending.changed = waiter.settle
        self.waiting.add(waiter)
        if self.alarm is None or waiter.due < self.alarm.when():
            self._set_alarm(waiter.due)
        try:
            await waiter.future
        finally:
            self.waiting.discard(waiter)
            pending.changed = bool

    def _set_alarm(self, due: float) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
        self.alarm = self.loop.call_at(due, self._ring)

    def _ring(self) -> None:
        """Those whose time is over hear of it; one alarm for all, as nearly all hear of something else long before."""
        self.alarm, now = None, self.loop.time()
        for waiter in self.waiting:
            if waiter.due <= now:
                waiter.settle(waiter.late)
        left = [waiter.due for waiter in self.waiting if waiter.due > now]
        if left:
            self._set_alarm(min(left))

    async def close(self) -> None:
        self.task.cancel()
        if self.alarm is not None:
            self.alarm.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.socket.close()


class AsyncClient:
    """Used as `async with AsyncClient() as client:`; as `Client`. `address` may be several, with blanks between."""

    def __init__(self, address: str | None = None, timeout: float = 600.0, connect_timeout: float = 5.0) -> None:
        self.timeout, self._address, self._connect_timeout = timeout, address, connect_timeout
        self._lines: list[AsyncLine] = []
        self._next = 0

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        self._lines = [AsyncLine(address) for address in (self._address or find_address()).split()]
        await self._greeted()
        welcome = self._lines[0].exchange.welcome
        assert welcome is not None
        self.model, self.max_model_len = welcome.model, welcome.max_model_len
        known = {line.address for line in self._lines}
        self._lines += [AsyncLine(other) for other in welcome.addresses if other not in known]
        await self._greeted()

    async def _greeted(self) -> None:
        """Until every tokenizer has answered. Raises `CannotConnect`."""
        late = CannotConnect("the server does not answer")
        try:
            for line in self._lines:
                if not line.exchange.greeting.over:
                    await line.changed(line.exchange.greeting, self._connect_timeout, late)
        except CannotConnect:
            await self.close()
            raise

    async def close(self) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            await line.close()

    async def generate(
        self, prompt: str | list[int] | None = None, *, timeout: float | None = None, **wishes: Any
    ) -> Completion:
        """The whole answer to a text or to token ids."""
        return await self._whole(prompt, None, timeout, wishes)

    async def chat(self, messages: list[dict[str, Any]], *, timeout: float | None = None, **wishes: Any) -> Completion:
        """The whole answer to a conversation."""
        return await self._whole(None, messages, timeout, wishes)

    async def stream(
        self,
        prompt: str | list[int] | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        timeout: float | None = None,
        **wishes: Any,
    ) -> AsyncStream:
        """The answer as it comes; leaving the stream early aborts it."""
        line = self._line()
        message = generate_message(line.exchange.label(), True, prompt, messages, wishes)
        return AsyncStream(line, await self._send(line, message), timeout or self.timeout)

    async def attach(self, key: str, offset: int, *, timeout: float | None = None) -> AsyncStream:
        """Go on with a stream that was started with `detach`, from its output token `offset`."""
        line = self._line_of(key)
        message = Attach(line.exchange.label(), key, offset)
        return AsyncStream(line, await self._send(line, message), timeout or self.timeout)

    async def tokenize(
        self, text: str | None, add_special_tokens: bool = True, *, messages: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Of a text, or of a conversation."""
        return (await self._ask(lambda label: Tokenize(label, text, messages, add_special_tokens), Tokenized)).ids

    async def detokenize(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return (await self._ask(lambda label: Detokenize(label, ids, skip_special_tokens), Detokenized)).text

    async def models(self) -> list[str]:
        return (await self._ask(Models, ModelList)).models

    async def status(self) -> dict[str, Any]:
        """Figures of the schedulers, summed over the replicas."""
        return (await self._ask(Status, StatusReply)).status

    async def trace(self, last: int = 4096) -> list[Track]:
        """The times of the last steps in each role."""
        replies = [
            await self._answer(line, await self._send(line, Trace(line.exchange.label(), last)), TraceReply)
            for line in list(self._lines)
        ]
        return list({track.role: track for reply in replies for track in reply.tracks}.values())

    async def metrics(self) -> MetricsReply:
        """Figures and histograms of all schedulers and tokenizers."""
        return merged(
            [
                await self._answer(line, await self._send(line, Metrics(line.exchange.label())), MetricsReply)
                for line in list(self._lines)
            ]
        )

    async def _whole(
        self,
        prompt: str | list[int] | None,
        messages: list[dict[str, Any]] | None,
        timeout: float | None,
        wishes: dict[str, Any],
    ) -> Completion:
        line = self._line()
        message = generate_message(line.exchange.label(), False, prompt, messages, wishes)
        return completion(await self._answer(line, await self._send(line, message), Done, timeout))

    async def _ask(self, make: Callable[[str], FromClient], kind: type[R]) -> R:
        line = self._line()
        return await self._answer(line, await self._send(line, make(line.exchange.label())), kind)

    async def _answer(self, line: AsyncLine, pending: Pending, kind: type[R], timeout: float | None = None) -> R:
        timeout = timeout or self.timeout
        try:
            while not pending.over:
                await line.changed(pending, timeout, TimedOut(f"no answer within {timeout:.0f} s"))
        except (TimedOut, asyncio.CancelledError):
            await abort(line, pending)
            raise
        if pending.error is not None:
            raise pending.error
        reply = pending.events.popleft()
        if not isinstance(reply, kind):
            raise InternalError(f"a {type(reply).__name__} came where a {kind.__name__} was due")
        return reply

    def _line(self) -> AsyncLine:
        if not self._lines:
            raise CannotConnect("the client is not connected")
        self._next += 1
        return self._lines[self._next % len(self._lines)]

    def _line_of(self, key: str) -> AsyncLine:
        """To the tokenizer that the key names; any where it names none, which will say so."""
        index = key.partition("-")[0]
        welcomes = [(line, line.exchange.welcome) for line in self._lines]
        known = (line for line, welcome in welcomes if welcome is not None and str(welcome.index) == index)
        return next(known, None) or self._line()

    async def _send(self, line: AsyncLine, message: FromClient) -> Pending:
        pending, frame = line.exchange.begin(message)
        await line.socket.send(frame)
        return pending


async def abort(line: AsyncLine, pending: Pending) -> None:
    frame = line.exchange.abort(pending)
    if frame is not None and not line.socket.closed:
        await line.socket.send(frame)


class AsyncStream:
    """`async for chunk in stream`; `result` is the whole once it is over."""

    def __init__(self, line: AsyncLine, pending: Pending, timeout: float) -> None:
        self._line, self._pending, self._timeout = line, pending, timeout
        self._chunks: list[Chunk] = []
        self.result: Completion | None = None

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        late = TimedOut(f"no token within {self._timeout:.0f} s")
        while self.result is None and not self.closed:
            for chunk in await self.take(self._timeout, late):
                yield chunk

    @property
    def key(self) -> str:
        """For `AsyncClient.attach`; there with the first token of a stream that was started with `detach`."""
        return self._pending.key

    @property
    def closed(self) -> bool:
        """Ended from this side: nothing more will come."""
        pending = self._pending
        return pending.over and pending.error is None and not pending.events and self.result is None

    async def take(self, timeout: float, late: Exception) -> list[Chunk]:
        """All that has come: at least one chunk until `result` is there or the stream is closed.

        Raises the request's error, or `late` after `timeout` seconds without anything.
        """
        pending = self._pending
        if not pending.events and not pending.over:
            await self._line.changed(pending, timeout, late)
        if pending.error is not None and not pending.events:
            raise pending.error
        chunks = []
        while pending.events:
            event = pending.events.popleft()
            if isinstance(event, Done):
                self.result = completion(event, self._chunks)
            else:
                self._chunks.append(event)
                chunks.append(event)
        return chunks

    async def close(self) -> None:
        """Abort what has not come yet."""
        await abort(self._line, self._pending)

    async def detach(self) -> None:
        """Leave the request to itself for the seconds it was given."""
        frame = self._line.exchange.detach(self._pending)
        if frame is not None and not self._line.socket.closed:
            await self._line.socket.send(frame)
