"""A tokenizer's way back: tokens to their requests, text to their clients, and each request's one last word.

Knows no handler of client messages and no start-up.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from ipc.errors import Aborted, DeadlineExceeded, InternalError, SidestepError
from ipc.internal import Cancel, TokenBatch, ToScheduler
from ipc.messages import Done, Logprob, Track
from ipc.public import PublicSocket
from ipc.sockets import Sender
from proc.conversation import Live, entries
from proc.counters import Counters
from proc.deadlines import Deadlines
from proc.requests import Requests
from proc.routing import Routing
from runtime.request import Finish

log = logging.getLogger(__name__)
STEPS = 4096  # remembered for a trace
STEP_COLUMNS = ("scheduler", "step", "taken", "detokenized", "delivered")  # times in ns of CLOCK_MONOTONIC


class Delivery:
    """Of tokenizer `index`, which shares its public socket and its ways to the schedulers."""

    def __init__(self, index: int, public: PublicSocket, schedulers: list[Sender[ToScheduler]]) -> None:
        self.index, self.public, self.schedulers = index, public, schedulers
        self.requests = Requests(index)
        self.live = self.requests.live
        self.routing = Routing(len(schedulers))
        self.forget_grammar: Callable[[int, int], None] = lambda number, replica: None  # of a structured request
        self.counters = Counters()
        self.deadlines = Deadlines()
        self.steps: deque[list[int]] = deque(maxlen=STEPS)  # STEP_COLUMNS of each
        self._unsent: list[list[int]] = []  # of `steps`, what the clients have not been sent yet

    @property
    def track(self) -> Track:
        return Track(f"tokenizer{self.index}", list(STEP_COLUMNS), list(self.steps))

    def flush(self) -> None:
        """Send what the clients will take; those that have gone lose their requests."""
        for client in self.public.flush():
            self.forget(client)
        for step in self._unsent:
            step[-1] = time.monotonic_ns()
        self._unsent.clear()

    def take_tokens(self, batch: TokenBatch) -> None:
        """Each row's token to its request; a chunk for those that stream, a last word for those that end."""
        now = time.monotonic_ns()
        for started in batch.started:
            if started.request in self.live:
                self.live[started.request].started(started)
        told = self.told(batch) if batch.logprobs else {}
        rows = zip(
            np.frombuffer(batch.requests, "<u8").tolist(),
            np.frombuffer(batch.offsets, "<i4").tolist(),
            np.frombuffer(batch.ids, "<i4").tolist(),
            batch.finishes,
            strict=True,
        )
        for number, offset, token, finish in rows:
            live = self.live.get(number)
            if live is None:
                continue
            if offset != len(live.ids):
                self.out_of_order(number, live, offset)
                continue
            self.counters.token(live, now)
            chunk = live.push(token, finish, now, told.get(number))
            if chunk is not None:
                self.public.chunk(live.client, chunk)
            if finish or live.stop is not None:
                self.over(number, live, finish)
        self._unsent.append([batch.scheduler, batch.step, now, time.monotonic_ns(), 0])
        self.steps.append(self._unsent[-1])

    def told(self, batch: TokenBatch) -> dict[int, list[Logprob]]:
        """The log probabilities of this step's tokens, by request; those of prompts are kept for the last word."""
        found = {}
        for one in batch.logprobs:
            live = self.live.get(one.request)
            if live is not None and one.offset < 0:
                live.tell_prompt(one)
            elif live is not None:
                found[one.request] = entries(one, live.tokenizer)[0]
        return found

    def out_of_order(self, number: int, live: Live, offset: int) -> None:
        """A token that is there already is dropped; one that comes too early means that some were lost."""
        if offset > len(live.ids):
            self.cancel(number)
            self.fail(number, InternalError(f"tokens {len(live.ids)} to {offset - 1} were lost"))

    def over(self, number: int, live: Live, finish: int) -> None:
        """The last token has been taken; a stop string in its text counts before any other reason."""
        if live.stop is not None:
            self.cancel(number)
            self.end(number, "stop", live.stop)
        elif finish == Finish.STOP:
            token = live.ids[-1]
            self.end(number, "stop", token if token in live.message.sampling.stop_token_ids else None)
        else:
            self.end(number, "length", None)

    # -- the last word

    def end(self, number: int, reason: str, stop: int | str | None) -> None:
        live = self.remove(number)
        if live is not None:
            self.counters.ended(live, reason)
            self.say(live, live.done(reason, stop))

    def fail(self, number: int, error: SidestepError) -> None:
        live = self.remove(number)
        if live is not None:
            self.counters.ended(live, "abort" if isinstance(error, Aborted) else "error")
            self.say(live, error)

    def say(self, live: Live, last: Done | SidestepError) -> None:
        """The last word, to the client where there is one."""
        live.last = last
        if isinstance(last, Done) and live.client:
            self.public.send(live.client, msgspec.structs.replace(last, id=live.label))
        elif isinstance(last, SidestepError) and live.client:
            self.public.error(live.client, live.label, last)

    def remove(self, number: int) -> Live | None:
        live = self.requests.remove(number, time.monotonic())
        if live is not None:
            self.routing.ended(live.replica)
            if live.structured:
                self.forget_grammar(number, live.replica)
        return live

    def cancel(self, number: int) -> None:
        """Nobody wants the rest of a live request."""
        live = self.live.get(number)
        if live is not None:
            self.schedulers[live.replica].send(Cancel(number))

    def forget(self, client: bytes) -> None:
        """A client has gone, or reads so slowly that it cannot be served."""
        log.info("client %s has gone or reads too slowly", client.hex())
        for number in self.requests.of(client):
            self.leave(number)

    def leave(self, number: int) -> None:
        """A request without a client ends, at once or once its time is over."""
        self.requests.detach(number, time.monotonic())
        if not self.live[number].message.detach:
            self.cancel(number)
            self.fail(number, Aborted("nobody is there to read the answer"))

    def expire(self, now: float) -> None:
        """End what has outlived its deadline, or its client for too long."""
        for number in self.requests.expired(now):
            self.cancel(number)
            self.fail(number, Aborted("nobody came back for the answer"))
        for number in self.deadlines.due(now):
            if number in self.live:
                self.cancel(number)
                milliseconds = self.live[number].message.timeout_ms
                self.fail(number, DeadlineExceeded(f"timeout_ms is over: {milliseconds} ms", "timeout_ms"))

    def fail_structured(self, replica: int, error: SidestepError) -> None:
        """Those that would wait for the grammar process of a replica."""
        for number in [n for n, live in self.live.items() if live.structured and live.replica == replica]:
            self.cancel(number)
            self.fail(number, error)

    def fail_all(self, error: SidestepError) -> None:
        for number in list(self.live):
            self.cancel(number)
            self.fail(number, error)
