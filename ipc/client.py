"""The client for ordinary code. Streams are iterators and context managers; several threads may share a client."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import zmq

from ipc.endpoints import discover
from ipc.errors import CannotConnect, InternalError, SidestepError, TimedOut
from ipc.exchange import Completion, Exchange, Pending, completion, generate_message, merged
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

SLICE = 0.05  # seconds one thread waits on the sockets before another may
R = TypeVar("R")


def find_address() -> str:
    """Of the server to talk to: $SIDESTEP_ADDRESS, else the user's one running server. Raises `CannotConnect`."""
    chosen = os.environ.get("SIDESTEP_ADDRESS")
    if chosen:
        return chosen
    servers = discover()
    if len(servers) != 1:
        names = ", ".join(f"{server['model']} at {server['addresses'][0]}" for server in servers) or "none"
        raise CannotConnect(
            f"no address was given, and the running servers are: {names};"
            " start one (sidestep serve), or name its address"
        )
    return str(servers[0]["addresses"][0])


def connect(socket: Any, address: str) -> None:
    """Raises `CannotConnect` for what is no address."""
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise CannotConnect(
            f"{address} is no address of a ZMQ socket, ipc://PATH or tcp://HOST:PORT: {error}"
        ) from None


class Line:
    """One connection, to one tokenizer."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.RCVHWM, 100_000)
        self.socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        connect(self.socket, address)
        self.address = address
        self.exchange = Exchange(time.monotonic())
        self.socket.send(self.exchange.hello())

    def take(self) -> None:
        """Everything that has arrived, and a ping where all is silent."""
        while self.socket.poll(0):
            self.exchange.feed(self.socket.recv(), time.monotonic())
        ping = self.exchange.tick(time.monotonic())
        if ping is not None:
            self.socket.send(ping)


class Client:
    """Talks to a server. `address` None: the one running server of this user, or $SIDESTEP_ADDRESS.

    `timeout` seconds bound each call, `connect_timeout` the first word. Every method raises `ipc.errors`.
    """

    def __init__(self, address: str | None = None, timeout: float = 600.0, connect_timeout: float = 5.0) -> None:
        self.timeout = timeout
        self._lock = threading.RLock()
        self._ended: SidestepError | None = None  # what every further call raises
        first = Line(address or find_address())
        self._lines = [first]
        self._next = 0
        self._until(lambda: first.exchange.welcome, connect_timeout, CannotConnect("the server does not answer"))
        welcome = first.exchange.welcome
        assert welcome is not None
        self.model, self.max_model_len = welcome.model, welcome.max_model_len
        self._lines += [Line(other) for other in welcome.addresses if other != first.address]
        answered = lambda: all(line.exchange.welcome for line in self._lines)  # noqa: E731
        self._until(answered, connect_timeout, CannotConnect("a tokenizer does not answer"))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._ended = CannotConnect("the client is closed")
            for line in self._lines:
                line.socket.close()
            self._lines = []

    def give_up(self, error: SidestepError) -> None:
        """For whoever knows that the server has ended: what is under way fails with `error`, and so do later calls."""
        with self._lock:
            self._ended = error
            for line in self._lines:
                line.exchange.fail(error)

    def generate(
        self, prompt: str | list[int] | None = None, *, timeout: float | None = None, **wishes: Any
    ) -> Completion:
        """The whole answer to a text or to token ids. `wishes`: fields of SamplingParams and of the request."""
        return self._whole(prompt, None, timeout, wishes)

    def chat(self, messages: list[dict[str, Any]], *, timeout: float | None = None, **wishes: Any) -> Completion:
        """The whole answer to a conversation."""
        return self._whole(None, messages, timeout, wishes)

    def stream(
        self,
        prompt: str | list[int] | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        timeout: float | None = None,
        **wishes: Any,
    ) -> Stream:
        """The answer as it comes; leaving the stream early aborts it."""
        line = self._line()
        message = generate_message(line.exchange.label(), True, prompt, messages, wishes)
        return Stream(self, line, self._send(line, message), timeout or self.timeout)

    def attach(self, key: str, offset: int, *, timeout: float | None = None) -> Stream:
        """Go on with a stream that was started with `detach`, from its output token `offset`."""
        line = self._line_of(key)
        return Stream(self, line, self._send(line, Attach(line.exchange.label(), key, offset)), timeout or self.timeout)

    def tokenize(
        self, text: str | None, add_special_tokens: bool = True, *, messages: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Of a text, or of a conversation."""
        return self._ask(lambda label: Tokenize(label, text, messages, add_special_tokens), Tokenized).ids

    def detokenize(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._ask(lambda label: Detokenize(label, ids, skip_special_tokens), Detokenized).text

    def models(self) -> list[str]:
        return self._ask(Models, ModelList).models

    def status(self) -> dict[str, Any]:
        """Figures of the schedulers, summed over the replicas."""
        return self._ask(Status, StatusReply).status

    def trace(self, last: int = 4096) -> list[Track]:
        """The times of the last steps in each role."""
        with self._lock:
            lines = list(self._lines)
        replies = [
            self._answer(line, self._send(line, Trace(line.exchange.label(), last)), TraceReply) for line in lines
        ]
        return list({track.role: track for reply in replies for track in reply.tracks}.values())

    def metrics(self) -> MetricsReply:
        """Figures and histograms of all schedulers and tokenizers."""
        with self._lock:
            lines = list(self._lines)
        return merged(
            [self._answer(line, self._send(line, Metrics(line.exchange.label())), MetricsReply) for line in lines]
        )

    def _whole(
        self,
        prompt: str | list[int] | None,
        messages: list[dict[str, Any]] | None,
        timeout: float | None,
        wishes: dict[str, Any],
    ) -> Completion:
        line = self._line()
        message = generate_message(line.exchange.label(), False, prompt, messages, wishes)
        return completion(self._answer(line, self._send(line, message), Done, timeout))

    def _ask(self, make: Callable[[str], FromClient], kind: type[R]) -> R:
        line = self._line()
        return self._answer(line, self._send(line, make(line.exchange.label())), kind)

    def _answer(self, line: Line, pending: Pending, kind: type[R], timeout: float | None = None) -> R:
        """The one reply of a request. Raises its error, or `TimedOut`, after which it is aborted."""
        timeout = timeout or self.timeout
        try:
            self._until(lambda: pending.over, timeout, TimedOut(f"no answer within {timeout:.0f} s"))
        except TimedOut:
            self._abort(line, pending)
            raise
        if pending.error is not None:
            raise pending.error
        reply = pending.events.popleft()
        if not isinstance(reply, kind):
            raise InternalError(f"a {type(reply).__name__} came where a {kind.__name__} was due")
        return reply

    def _line(self) -> Line:
        """The tokenizers take turns."""
        with self._lock:
            self._check()
            self._next += 1
            return self._lines[self._next % len(self._lines)]

    def _line_of(self, key: str) -> Line:
        """To the tokenizer that the key names; any where it names none, which will say so."""
        index = key.partition("-")[0]
        welcomes = [(line, line.exchange.welcome) for line in self._lines]
        known = (line for line, welcome in welcomes if welcome is not None and str(welcome.index) == index)
        return next(known, None) or self._line()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _send(self, line: Line, message: FromClient) -> Pending:
        with self._lock:
            self._check()
            pending, frame = line.exchange.begin(message)
            line.socket.send(frame)
            return pending

    def _detach(self, line: Line, pending: Pending) -> None:
        with self._lock:
            frame = line.exchange.detach(pending)
            if frame is not None and not line.socket.closed:
                line.socket.send(frame)

    def _abort(self, line: Line, pending: Pending) -> None:
        with self._lock:
            frame = line.exchange.abort(pending)
            if frame is not None and not line.socket.closed:
                line.socket.send(frame)

    def _until(self, done: Callable[[], Any], timeout: float, late: Exception) -> None:
        """Take what comes until `done`; several threads do so in turns."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if done():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise late
                self._pump(min(left, SLICE))

    def _pump(self, seconds: float) -> None:
        self._check()
        poller = zmq.Poller()
        for line in self._lines:
            poller.register(line.socket, zmq.POLLIN)
        poller.poll(int(seconds * 1000) + 1)
        for line in self._lines:
            line.take()


class Stream:
    """Iterate over its chunks (`text`, `ids`); `result` is the whole once it is over."""

    def __init__(self, client: Client, line: Line, pending: Pending, timeout: float) -> None:
        self._client, self._line, self._pending, self._timeout = client, line, pending, timeout
        self._chunks: list[Chunk] = []
        self.result: Completion | None = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        pending = self._pending
        late = TimedOut(f"no token within {self._timeout:.0f} s")
        while self.result is None:
            self._client._until(lambda: pending.events or pending.over, self._timeout, late)
            if not pending.events:
                if pending.error is not None:
                    raise pending.error
                return
            event = pending.events.popleft()
            if isinstance(event, Done):
                self.result = completion(event, self._chunks)
            else:
                self._chunks.append(event)
                yield event

    def close(self) -> None:
        """Abort what has not come yet."""
        self._client._abort(self._line, self._pending)

    @property
    def key(self) -> str:
        """For `Client.attach`; there with the first token of a stream that was started with `detach`."""
        return self._pending.key

    def detach(self) -> None:
        """Leave the request to itself for the seconds it was given."""
        self._client._detach(self._line, self._pending)
