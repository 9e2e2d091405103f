"""The tokenizer process: a public socket on one side, the schedulers on the other. Plans nothing, knows no device.

It owns each request's story towards the client: what text has been shown, which tokens count, and the last word.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import zmq

from ipc.endpoints import address
from ipc.errors import (
    Aborted,
    DuplicateId,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ProcessDied,
    ShuttingDown,
    SidestepError,
    from_wire,
)
from ipc.internal import Alive, Compiled, Load, Rejected, ReplicaReady, TokenBatch, ToScheduler, ToTokenizer
from ipc.messages import (
    PROTOCOL,
    Abort,
    Accepted,
    Attach,
    Detach,
    Detokenize,
    Detokenized,
    FromClient,
    Generate,
    Hello,
    Metrics,
    ModelList,
    Models,
    Ping,
    Pong,
    Status,
    Tokenize,
    Tokenized,
    Trace,
    Welcome,
    decode_from_client,
    label_of,
)
from ipc.public import PublicSocket
from ipc.sockets import Receiver, Sender
from proc.admission import Admissions, ToGrammar
from proc.conversation import Live
from proc.delivery import Delivery
from proc.models import load_tokenizer, served_name
from proc.prompts import Prompts
from proc.questions import Questions
from proc.role import Command, Poller, ProcessSpec
from proc.settings import UsageError
from proc.silence import Silence
from runtime.tokenizer import TextError

log = logging.getLogger(__name__)
TURN = 64  # messages taken from clients before tokens are looked at again
LONGEST_TURN = 0.05  # seconds, the same: a long prompt may take one to encode
PROBE = 1.0  # seconds between looks whether the clients are still there


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
        self.grammars: list[Sender[ToGrammar]] = [
            Sender(address(spec.run_dir, "grammar", n, "in")) for n in range(spec.num_schedulers)
        ]
        self.delivery = Delivery(index, self.public, self.schedulers)
        self.requests = self.delivery.requests
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
        self.tokenizer = load_tokenizer(settings, self.spec.folder)
        deadline = time.monotonic() + settings.startup_timeout
        while len(self.replicas) < self.spec.num_schedulers:
            message = self.inbox.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise TimeoutError(f"the schedulers were not ready within {settings.startup_timeout:.0f} s")
            if isinstance(message, ReplicaReady):  # a grammar process may say that it lives before the last one is
                self.replicas.append(message)
        self.max_model_len = min(replica.max_model_len for replica in self.replicas)
        self.vocab_size = min(replica.vocab_size for replica in self.replicas)
        self.prompts = Prompts(self.tokenizer, self.max_model_len, self.vocab_size)
        self.admissions = Admissions(self.index, settings, self.tokenizer, self.prompts, self.schedulers, self.grammars)
        self.delivery.forget_grammar = self.admissions.forget
        facts: dict[str, Any] = {"model": self.name, "device": self.replicas[0].device}
        facts |= {"vocab_size": self.vocab_size, "max_model_len": self.max_model_len}
        self.grammar_silence = Silence(self.spec.num_schedulers, time.monotonic())
        self.questions = Questions(self.index, self.schedulers, facts, self.grammar_silence)
        return {"public": self.public.address}

    def turn(self, poller: Poller) -> None:
        """Wait; take requests; take tokens; send; look after clients that have gone and after a drain."""
        longest = 0.02 if self.public.backlog else 0.1 if self.draining else PROBE
        poller.wait(self.delivery.deadlines.wait(time.monotonic(), longest))
        self.take_requests(time.monotonic() + LONGEST_TURN)
        while (message := self.inbox.receive(0)) is not None:
            self.take(message)
        self.look_after(time.monotonic())
        self.delivery.flush()

    # -- from clients

    def take_requests(self, until: float) -> None:
        """What has arrived, up to a number and a time: those who wait for a word must not wait for a burst."""
        for _ in range(TURN):
            received = self.public.receive()
            if received is None:
                return
            self.answer(*received)
            if time.monotonic() > until:
                return

    def answer(self, client: bytes, frame: bytes) -> None:
        """Whatever a client sends is answered, with an error at worst; nothing it sends ends the loop."""
        try:
            message = decode_from_client(frame)
            self.handlers[type(message)](self, client, message)
        except SidestepError as error:
            self.refuse(client, frame, error)
        except TextError as error:
            self.refuse(client, frame, InvalidRequest(str(error), error.param))
        except Exception:  # a fault of ours; it costs this request alone
            log.exception("a message of a client could not be answered")
            self.refuse(client, frame, InternalError("the server could not make sense of this message"))

    def refuse(self, client: bytes, frame: bytes, error: SidestepError) -> None:
        log.debug("refused: %s", error)
        self.public.error(client, label_of(frame), error)

    def hello(self, client: bytes, message: Hello) -> None:
        if message.version != PROTOCOL:
            raise InvalidRequest(f"version {message.version} is not spoken here, {PROTOCOL} is", "version")
        self.public.send(client, Welcome(PROTOCOL, self.name, self.max_model_len, self.addresses, self.index))

    def generate(self, client: bytes, message: Generate) -> None:
        """Admit a request. Raises a `RequestError` or `TextError` that names what is wrong with it."""
        arrived = time.monotonic_ns()
        if self.draining is not None:
            raise ShuttingDown("the server is shutting down")
        if not message.id:
            raise InvalidRequest("id must not be empty", "id")
        if message.detach and not message.stream:
            raise InvalidRequest("detach needs stream", "detach")
        if self.requests.number(client, message.id) is not None:
            raise DuplicateId(f"a request {message.id!r} of this client is live already", "id")
        if message.model not in (None, self.name):
            raise ModelNotFound(f"the model here is {self.name}, not {message.model}", "model")
        request = self.admissions.understand(message)
        seed = self.seeds.getrandbits(64) if message.sampling.seed is None else message.sampling.seed
        live = Live(client, message, request.ids, self.tokenizer, seed, arrived, request.parser)
        early = live.already_over(request.params)
        if early is not None:
            self.public.send(client, live.done(*early))
            return
        live.replica = self.delivery.routing.choose(request.ids)
        number = self.requests.add(live)
        if live.key:
            self.public.send(client, Accepted(message.id, live.key))
        if message.timeout_ms is not None:
            self.delivery.deadlines.set(number, arrived / 1e9 + message.timeout_ms / 1e3)
        self.admissions.send(number, live, request)

    def abort(self, client: bytes, message: Abort) -> None:
        number = self.requests.number(client, message.id)
        if number is not None:
            self.delivery.cancel(number)
            self.delivery.fail(number, Aborted("the request was aborted"))

    def detach(self, client: bytes, message: Detach) -> None:
        number = self.requests.number(client, message.id)
        if number is not None:
            self.delivery.leave(number)

    def attach(self, client: bytes, message: Attach) -> None:
        """Show what has been generated since; a live request goes on here. Raises `InvalidRequest`, `DuplicateId`."""
        before = self.requests.holder(message.key)
        live = self.requests.attach(message.key, message.offset, client, message.id)
        if before is not None:
            self.public.error(*before, Aborted("the stream goes on elsewhere"))
        if message.offset < len(live.ids):
            self.public.chunk(client, live.since(message.offset))
        if live.last is not None:
            self.delivery.say(live, live.last)

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
        Detach: detach,
        Attach: attach,
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
            self.delivery.take_tokens(message)
        elif isinstance(message, Compiled):
            self.take_compiled(message)
        elif isinstance(message, Rejected):
            self.delivery.cancel(message.request)
            self.delivery.fail(message.request, from_wire(message.code, message.message, message.param))
        elif isinstance(message, Load):
            self.take_load(message)
        elif isinstance(message, Alive):
            self.grammar_silence.lives(message.index, time.monotonic())

    def take_compiled(self, compiled: Compiled) -> None:
        """A grammar is there; its request may have ended meanwhile."""
        live = self.delivery.live.get(compiled.request)
        if live is None:
            self.admissions.forget(compiled.request, compiled.replica)
        else:
            self.admissions.compiled(compiled.request, live)

    def take_load(self, load: Load) -> None:
        reply = self.questions.take(load, self.delivery.track, self.delivery.counters)
        if reply is not None:
            self.public.send(*reply)

    def look_after(self, now: float) -> None:
        if now - self.probed > PROBE:
            self.probed = now
            for client in self.requests.clients:
                self.public.probe(client)
            for replica in self.grammar_silence.lost(now):
                error = ProcessDied(f"the process that makes grammars and masks, grammar-{replica}, does not answer")
                self.delivery.fail_structured(replica, error)
        self.delivery.expire(now)
        if self.draining is not None:
            if now > self.draining:
                self.delivery.fail_all(ShuttingDown("the server has shut down"))
            self.finished = not self.requests.live and not self.public.backlog

    def command(self, command: Command) -> None:
        """`addresses`: those of all tokenizers. `drain`: no new requests, end with the last. `fail`: end all now."""
        if command.kind == "addresses":
            self.addresses = command.message.split()
        elif command.kind == "drain":
            self.draining = time.monotonic() + command.timeout
        elif command.kind == "fail":
            self.draining = time.monotonic()
            self.delivery.fail_all(ProcessDied(command.message))
            self.public.flush()
            self.finished = True

    def close(self) -> None:
        self.public.close()
        self.inbox.close()
        for scheduler in self.schedulers:
            scheduler.close()
        for grammar in self.grammars:
            grammar.close()


def _public(spec: ProcessSpec, index: int) -> PublicSocket:
    """Raises `UsageError` for an address that cannot be had."""
    wanted = spec.settings.zmq_address
    if wanted is None:
        return PublicSocket(address(spec.run_dir, "tokenizer", index, "public"))
    try:
        return PublicSocket(wanted, index)
    except (ValueError, zmq.ZMQError) as error:
        raise UsageError(f"--zmq-address {wanted}: {error}") from None
