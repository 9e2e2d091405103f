"""The grammar process: compiles structured outputs, and computes the masks of each step while its forward pass runs.

A step's order comes from the scheduler as soon as all ids before it are known; the masks go into the ring and the
plan's second half straight to the workers. Compiling has a thread of its own, so that no mask waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ipc.endpoints import address
from ipc.errors import InternalError, InvalidRequest
from ipc.internal import Alive, Compile, Compiled, Forget, Rejected, ReplicaReady, ToTokenizer
from ipc.mask_ring import MaskRing
from ipc.sockets import Receiver, Sender
from proc.models import load_tokenizer
from proc.role import Command, Poller, ProcessSpec
from proc.shapes import ring_shape
from runtime.step import ID_DTYPE, MaskOrder, SampleHalf

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from runtime.grammar import Grammars, Matchers

log = logging.getLogger(__name__)
BEAT = 1.0  # seconds between words that this process lives
THREADS = max(1, (os.cpu_count() or 1) // 4)  # masks computed at once


class GrammarLoop:
    """Of one replica. llguidance is loaded with the first grammar."""

    finished = False
    grammars: Grammars
    matchers: Matchers
    ring: MaskRing

    def __init__(self, spec: ProcessSpec, index: int) -> None:
        self.spec, self.index = spec, index
        kinds = Compile | Forget | MaskOrder | ReplicaReady
        self.inbox: Receiver[Compile | Forget | MaskOrder | ReplicaReady] = Receiver(
            address(spec.run_dir, "grammar", index, "in"), kinds
        )
        self.workers: list[Sender[SampleHalf]] = [
            Sender(address(spec.run_dir, "worker", n, "halves")) for n in spec.workers(index)
        ]
        self.tokenizers: list[Sender[ToTokenizer]] = [
            Sender(address(spec.run_dir, "tokenizer", n, "in")) for n in range(spec.num_tokenizers)
        ]
        self.owners: dict[int, Compile] = {}  # by request: those whose grammar is wanted
        self.loaded = False
        self.beat = 0.0  # monotonic seconds of the last word
        self.compiler = ThreadPoolExecutor(1, "compiler")
        self.compiled: deque[tuple[Compile, LLMatcher | Exception]] = deque()
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def sockets(self) -> list[Any]:
        return [self.inbox.socket, self.news]

    def start(self) -> dict[str, Any]:
        """Wait for the replica's vocabulary. Raises `TimeoutError`."""
        settings = self.spec.settings
        ready = self.inbox.receive(settings.startup_timeout)
        if not isinstance(ready, ReplicaReady):
            raise TimeoutError(f"the scheduler was not ready within {settings.startup_timeout:.0f} s")
        self.vocab_size = ready.vocab_size
        self.ring = MaskRing(*ring_shape(settings), ready.vocab_size, self.spec.rings[self.index])
        return {}

    def turn(self, poller: Poller) -> None:
        """Orders for masks, and grammars: those that have come and those that are compiled; and a word a second."""
        poller.wait(BEAT)
        while (message := self.inbox.receive(0)) is not None:
            if isinstance(message, MaskOrder):
                self.order(message)
            elif isinstance(message, Compile):
                self.owners[message.request] = message
                self.compiler.submit(self.compile, message)
            elif isinstance(message, Forget):
                self.forget(message.request)
        self.take_compiled()
        self.say_alive(time.monotonic())

    def say_alive(self, now: float) -> None:
        if now - self.beat >= BEAT:
            self.beat = now
            for tokenizer in self.tokenizers:
                tokenizer.send(Alive(self.index))

    def order(self, order: MaskOrder) -> None:
        """Write the masks of a step and tell the workers."""
        rows, offsets, ids = (np.frombuffer(part, ID_DTYPE) for part in (order.rows, order.offsets, order.ids))
        requests, bits = np.frombuffer(order.requests, "<u8").tolist(), self.ring.entry(order.step)
        entries, wrong = self.matchers.masks(requests, offsets.tolist(), ids.tolist(), bits)
        for request, words in wrong.items():
            self.fail(request, words)
        chosen = rows[entries].tobytes()
        half = SampleHalf(order.epoch, order.step, chosen, order.ordered, time.monotonic_ns())
        for worker in self.workers:
            worker.send(half)

    def fail(self, request: int, words: str) -> None:
        """Something went wrong on the way: llguidance's limits, or else a fault of ours."""
        owner = self.owners.get(request)
        self.forget(request)
        if owner is not None:
            kind = InvalidRequest if "too complex" in words else InternalError
            self.reject(owner, kind.code, words)

    def reject(self, message: Compile, code: str, words: str) -> None:
        reply = Rejected(message.request, code, f"{message.param}: {words}", message.param)
        self.tokenizers[message.tokenizer].send(reply)

    def forget(self, request: int) -> None:
        self.owners.pop(request, None)
        if self.loaded:
            self.matchers.forget(request)

    def compile(self, message: Compile) -> None:
        """In the compiler's thread, unless nobody waits for it any more."""
        if message.request not in self.owners:
            return
        try:
            if not self.loaded:
                self.load()
            output = np.frombuffer(message.output_ids, ID_DTYPE).tolist()
            result: LLMatcher | Exception = self.grammars.compile(message.kind, message.text, output)
        except Exception as error:
            result = error
        self.compiled.append((message, result))
        os.eventfd_write(self.news, 1)

    def load(self) -> None:
        """llguidance and the bytes of every token. Raises `GrammarError` for a vocabulary that cannot have grammars."""
        from runtime.grammar import Grammars, Matchers

        self.grammars = Grammars(load_tokenizer(self.spec.settings, self.spec.folder), self.vocab_size, THREADS)
        self.matchers = Matchers(self.grammars.executor)
        self.loaded = True

    def take_compiled(self) -> None:
        """Let the tokenizers know of what the compiler has done."""
        try:
            os.eventfd_read(self.news)
        except BlockingIOError:
            return
        while self.compiled:
            message, result = self.compiled.popleft()
            if message.request not in self.owners:
                continue
            if isinstance(result, Exception):
                if not isinstance(result, ValueError):
                    log.error("a grammar could not be compiled", exc_info=result)
                del self.owners[message.request]
                self.reject(message, InvalidRequest.code, str(result))
                continue
            self.matchers.follow(message.request, result, len(message.output_ids) // 4)
            self.tokenizers[message.tokenizer].send(Compiled(message.request, self.index))

    def command(self, command: Command) -> None:
        """Nothing to drain: it ends after the tokenizers."""

    def close(self) -> None:
        self.compiler.shutdown(wait=False, cancel_futures=True)
        self.inbox.close()
        for worker in self.workers:
            worker.close()
        for tokenizer in self.tokenizers:
            tokenizer.close()
