"""The tokenizer process: a public socket on one side, the schedulers on the other. Plans nothing, knows no device.

It owns each request's story towards the client: what text has been shown, which tokens count, and the last word.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from ipc.endpoints import address
from ipc.errors import (
    Aborted,
    DeadlineExceeded,
    DuplicateId,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ProcessDied,
    ShuttingDown,
    SidestepError,
    from_wire,
)
from ipc.messages import (
    PROTOCOL,
    Abort,
    Admit,
    Cancel,
    Detokenize,
    Detokenized,
    FromClient,
    Generate,
    Hello,
    Load,
    Metrics,
    ModelList,
    Models,
    Ping,
    Pong,
    Rejected,
    ReplicaReady,
    Status,
    TokenBatch,
    Tokenize,
    Tokenized,
    ToScheduler,
    ToTokenizer,
    Trace,
    Track,
    Welcome,
    decode_from_client,
    label_of,
)
from ipc.public import PublicSocket
from ipc.sockets import Receiver, Sender
from proc.conversation import Live, resolved
from proc.counters import Counters
from proc.deadlines import Deadlines
from proc.models import served_name
from proc.prompts import Prompts
from proc.questions import Questions
from proc.role import Command, Poller, ProcessSpec
from proc.routing import Routing
from proc.settings import UsageError
from runtime.request import Finish
from runtime.tokenizer import ByteTokenizer, TextError, Tokenizer

log = logging.getLogger(__name__)
TURN = 256  # messages taken from clients before tokens are looked at again
PROBE = 1.0  # seconds between looks whether the clients are still there
STEPS = 4096  # remembered for a trace
STEP_COLUMNS = ("scheduler", "step", "taken", "detokenized", "delivered")  # times in ns of CLOCK_MONOTONIC


class TokenizerLoop:
    """One tokenizer. `turn` takes what has arrived from clients and schedulers and sends what came of it."""

    finished = False

    def __init__(self, spec: ProcessSpec, index: int) -> None:
        self.spec, self.index = spec, index
        self.inbox: Receiver[ToTokenizer] = Receiver(address(spec.run_dir, "tokenizer", index, "in"), ToTokenizer)
        self.public = _public(spec, index)
        self.schedulers: list[Sender[ToScheduler]] = [
            Sender(address(spec.run_dir, "scheduler", n, "in")) for n in range(spec.num_schedulers)
        ]
        self.routing = Routing(spec.num_schedulers)
        self.live: dict[int, Live] = {}
        self.counters = Counters()
        self.labels: dict[tuple[bytes, str], int] = {}
        self.deadlines = Deadlines()
        self.steps: deque[list[int]] = deque(maxlen=STEPS)  # STEP_COLUMNS of each
        self.unsent: list[list[int]] = []  # of `steps`, what the clients have not been sent yet
        self.next_number = 0
        chosen = spec.settings.seed
        self.seeds = random.SystemRandom() if chosen is None else random.Random(f"{chosen}-{index}")
        self.draining: float | None = None  # monotonic seconds by which all must have ended
        self.probed = 0.0
        self.replicas: list[ReplicaReady] = []
        self.addresses = [self.public.address]
        self.name = served_name(spec.settings, spec.folder)

    @property
    def sockets(self) -> list[Any]:
        return [self.public.socket, self.inbox.socket]

    def start(self) -> dict[str, Any]:
        """Load the vocabulary and wait for every replica. Raises `TimeoutError`."""
        settings = self.spec.settings
        self.tokenizer: Tokenizer | ByteTokenizer = ByteTokenizer()
        if self.spec.folder:
            template = Path(settings.chat_template).read_text() if settings.chat_template else None
            self.tokenizer = Tokenizer(Path(self.spec.folder), template)
        while len(self.replicas) < self.spec.num_schedulers:
            message = self.inbox.receive(settings.startup_timeout)
            if not isinstance(message, ReplicaReady):
                raise TimeoutError(f"the schedulers were not ready within {settings.startup_timeout:.0f} s")
            self.replicas.append(message)
        self.max_model_len = min(replica.max_model_len for replica in self.replicas)
        self.vocab_size = min(replica.vocab_size for replica in self.replicas)
        self.prompts = Prompts(self.tokenizer, self.max_model_len, self.vocab_size)
        facts: dict[str, Any] = {"model": self.name, "device": self.replicas[0].device}
        facts |= {"vocab_size": self.vocab_size, "max_model_len": self.max_model_len}
        self.questions = Questions(self.index, self.schedulers, facts)
        return {"public": self.public.address}

    def turn(self, poller: Poller) -> None:
        """Wait; take requests; take tokens; send; look after clients that have gone and after a drain."""
        longest = 0.02 if self.public.backlog else 0.1 if self.draining else PROBE
        poller.wait(self.deadlines.wait(time.monotonic(), longest))
        for _ in range(TURN):
            received = self.public.receive()
            if received is None:
                break
            self.answer(*received)
        while (message := self.inbox.receive(0)) is not None:
            self.take(message)
        self.look_after(time.monotonic())
        for client in self.public.flush():
            self.forget(client)
        for step in self.unsent:
            step[-1] = time.monotonic_ns()
        self.unsent.clear()

    # -- from clients

    def answer(self, client: bytes, frame: bytes) -> None:
        """Whatever a client sends is answered, with an error at worst; nothing it sends ends the loop."""
        try:
            message = decode_from_client(frame)
            self.handlers[type(message)](self, client, message)
        except SidestepError as error:
            self.refuse(client, frame, error)
        except TextError as error:
            self.refuse(client, frame, InvalidRequest(str(error), error.param))

    def refuse(self, client: bytes, frame: bytes, error: SidestepError) -> None:
        log.debug("refused: %s", error)
        self.public.error(client, label_of(frame), error)

    def hello(self, client: bytes, message: Hello) -> None:
        if message.version != PROTOCOL:
            raise InvalidRequest(f"version {message.version} is not spoken here, {PROTOCOL} is", "version")
        self.public.send(client, Welcome(PROTOCOL, self.name, self.max_model_len, self.addresses))

    def generate(self, client: bytes, message: Generate) -> None:
        """Admit a request. Raises a `RequestError` or `TextError` that names what is wrong with it."""
        arrived = time.monotonic_ns()
        if self.draining is not None:
            raise ShuttingDown("the server is shutting down")
        if not message.id:
            raise InvalidRequest("id must not be empty", "id")
        if (client, message.id) in self.labels:
            raise DuplicateId(f"a request {message.id!r} of this client is live already", "id")
        if message.model not in (None, self.name):
            raise ModelNotFound(f"the model here is {self.name}, not {message.model}", "model")
        message.sampling.check()
        ids = self.prompts.ids(message)
        params = resolved(message.sampling, self.tokenizer)
        seed = message.sampling.seed
        live = Live(client, message, ids, self.tokenizer, self.seeds.getrandbits(64) if seed is None else seed, arrived)
        early = live.already_over(params)
        if early is not None:
            self.public.send(client, live.done(*early))
            return
        number = self.index << 56 | self.next_number
        self.next_number += 1
        live.replica = self.routing.choose(ids)
        self.live[number] = live
        self.labels[client, message.id] = number
        if message.timeout_ms is not None:
            self.deadlines.set(number, arrived / 1e9 + message.timeout_ms / 1e3)
        prompt, output = (np.array(part, "<i4").tobytes() for part in (ids, message.output_ids))
        admit = Admit(number, self.index, prompt, output, params, live.seed, message.priority)
        self.schedulers[live.replica].send(admit)

    def abort(self, client: bytes, message: Abort) -> None:
        number = self.labels.get((client, message.id))
        if number is not None:
            self.cancel(number)
            self.fail(number, Aborted("the request was aborted"))

    def tokenize(self, client: bytes, message: Tokenize) -> None:
        self.public.send(client, Tokenized(message.id, self.prompts.tokenize(message)))

    def detokenize(self, client: bytes, message: Detokenize) -> None:
        self.prompts.check_ids(message.ids, "ids")
        text = self.tokenizer.decode(message.ids, message.skip_special_tokens)
        self.public.send(client, Detokenized(message.id, text))

    def models(self, client: bytes, message: Models) -> None:
        self.public.send(client, ModelList(message.id, [self.name]))

    def ask(self, client: bytes, message: Status | Trace | Metrics) -> None:
        self.questions.ask(client, message)

    def ping(self, client: bytes, message: Ping) -> None:
        self.public.send(client, Pong(message.id))

    handlers: dict[type[FromClient], Callable[[TokenizerLoop, bytes, Any], None]] = {  # noqa: RUF012
        Hello: hello,
        Generate: generate,
        Abort: abort,
        Tokenize: tokenize,
        Detokenize: detokenize,
        Models: models,
        Status: ask,
        Trace: ask,
        Metrics: ask,
        Ping: ping,
    }

    # -- from schedulers

    def take(self, message: ToTokenizer) -> None:
        if isinstance(message, TokenBatch):
            self.take_tokens(message)
        elif isinstance(message, Rejected):
            self.fail(message.request, from_wire(message.code, message.message, message.param))
        elif isinstance(message, Load):
            self.take_load(message)

    def take_tokens(self, batch: TokenBatch) -> None:
        """Each row's token to its request; a chunk for those that stream, a last word for those that end."""
        now = time.monotonic_ns()
        for started in batch.started:
            if started.request in self.live:
                self.live[started.request].started(started)
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
            chunk = live.push(token, finish, now)
            if chunk is not None:
                self.public.chunk(live.client, chunk)
            if finish or live.stop is not None:
                self.over(number, live, finish)
        self.unsent.append([batch.scheduler, batch.step, now, time.monotonic_ns(), 0])
        self.steps.append(self.unsent[-1])

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

    def take_load(self, load: Load) -> None:
        steps = Track(f"tokenizer{self.index}", list(STEP_COLUMNS), list(self.steps))
        reply = self.questions.take(load, steps, self.counters)
        if reply is not None:
            self.public.send(*reply)

    # -- the last word

    def end(self, number: int, reason: str, stop: int | str | None) -> None:
        live = self.remove(number)
        if live is not None:
            self.counters.ended(live, reason)
            self.public.send(live.client, live.done(reason, stop))

    def fail(self, number: int, error: SidestepError) -> None:
        live = self.remove(number)
        if live is not None:
            self.counters.ended(live, "abort" if isinstance(error, Aborted) else "error")
            self.public.error(live.client, live.message.id, error)

    def remove(self, number: int) -> Live | None:
        """The one place where a request leaves; the first last word wins."""
        live = self.live.pop(number, None)
        if live is not None:
            del self.labels[live.client, live.message.id]
            self.routing.ended(live.replica)
        return live

    def cancel(self, number: int) -> None:
        self.schedulers[self.live[number].replica].send(Cancel(number))

    def forget(self, client: bytes) -> None:
        """A client has gone, or reads so slowly that it cannot be served: its requests end."""
        log.info("client %s has gone or reads too slowly", client.hex())
        for number in [number for number, live in self.live.items() if live.client == client]:
            self.cancel(number)
            live = self.remove(number)
            if live is not None:
                self.counters.ended(live, "abort")

    def look_after(self, now: float) -> None:
        if now - self.probed > PROBE:
            self.probed = now
            for client in {live.client for live in self.live.values()}:
                self.public.probe(client)
        for number in self.deadlines.due(now):
            if number in self.live:
                self.cancel(number)
                milliseconds = self.live[number].message.timeout_ms
                self.fail(number, DeadlineExceeded(f"timeout_ms is over: {milliseconds} ms", "timeout_ms"))
        if self.draining is not None:
            if now > self.draining:
                self.fail_all(ShuttingDown("the server has shut down"))
            self.finished = not self.live and not self.public.backlog

    def command(self, command: Command) -> None:
        """`addresses`: those of all tokenizers. `drain`: no new requests, end with the last. `fail`: end all now."""
        if command.kind == "addresses":
            self.addresses = command.message.split()
        elif command.kind == "drain":
            self.draining = time.monotonic() + command.timeout
        elif command.kind == "fail":
            self.draining = time.monotonic()
            self.fail_all(ProcessDied(command.message))
            self.public.flush()
            self.finished = True

    def fail_all(self, error: SidestepError) -> None:
        for number in list(self.live):
            self.cancel(number)
            self.fail(number, error)

    def close(self) -> None:
        self.public.close()
        self.inbox.close()
        for scheduler in self.schedulers:
            scheduler.close()


def _public(spec: ProcessSpec, index: int) -> PublicSocket:
    """Raises `UsageError` for an address that cannot be had."""
    wanted = spec.settings.zmq_address
    if wanted is None:
        return PublicSocket(address(spec.run_dir, "tokenizer", index, "public"))
    try:
        return PublicSocket(wanted, index)
    except (ValueError, zmq.ZMQError) as error:
        raise UsageError(f"--zmq-address {wanted}: {error}") from None
