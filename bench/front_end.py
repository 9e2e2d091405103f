"""A lean front end of the public socket for measuring: all requests at their times, every token stamped as it comes.

It speaks the protocol directly, so that the client's own work is as small as a Python client's can be.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from dataclasses import dataclass, field

import zmq

from bench.overlap_workloads import Ask
from ipc.messages import Chunks, Done, Error, Generate, Hello, Welcome, decode_to_client, encode
from ipc.sampling_params import SamplingParams, StructuredOutputs

PATIENCE = 120.0  # seconds without a word


@dataclass
class Answer:
    """One request as it went; times in seconds from the start of the run."""

    sent: float = 0.0
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each token
    ended: float = 0.0


def ask_all(addresses: list[str], asks: list[Ask], stream: bool = True) -> list[Answer]:
    """Send each request when it is due and take what comes. Raises `RuntimeError` for an answer that is none."""
    sockets = [_connect(address) for address in addresses]
    try:
        return _Run(sockets, asks, stream).run()
    finally:
        for socket in sockets:
            socket.close()


def digests(answers: list[Answer]) -> list[bytes]:
    """Of each request's tokens."""
    return [hashlib.sha256(repr(answer.ids).encode()).digest()[:8] for answer in answers]


def _connect(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(address)
    socket.send(encode(Hello()))
    if not socket.poll(5000) or not isinstance(decode_to_client(socket.recv()), Welcome):
        raise RuntimeError(f"no welcome at {address}")
    return socket


class _Run:
    def __init__(self, sockets: list[zmq.Socket[bytes]], asks: list[Ask], stream: bool) -> None:
        self.sockets, self.asks = sockets, asks
        self.frames = [encode(_message(number, ask, stream)) for number, ask in enumerate(asks)]
        self.answers = {str(number): Answer() for number in range(len(asks))}
        self.left = len(asks)
        self.first = [number for number, ask in enumerate(asks) if ask.after is None]
        self.next = {ask.after: number for number, ask in enumerate(asks) if ask.after is not None}
        self.poller = zmq.Poller()
        for socket in sockets:
            self.poller.register(socket, zmq.POLLIN)

    def run(self) -> list[Answer]:
        self.began = heard = time.perf_counter()
        due = deque(self.first)
        while self.left:
            now = time.perf_counter()
            while due and self.asks[due[0]].due <= now - self.began:
                self.send(due.popleft())
            wait = self.began + self.asks[due[0]].due - now if due else 1.0
            for socket, _ in self.poller.poll(max(0, int(wait * 1000))):
                self.take(socket)
                heard = now
            if now - heard > PATIENCE and not due:
                raise RuntimeError(f"no word for {PATIENCE:.0f} s; {self.left} requests are open")
        return list(self.answers.values())

    def send(self, number: int) -> None:
        self.answers[str(number)].sent = time.perf_counter() - self.began
        self.sockets[number % len(self.sockets)].send(self.frames[number])

    def take(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = decode_to_client(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            now = time.perf_counter() - self.began
            if isinstance(message, Chunks):
                for chunk in message.items:
                    answer = self.answers[chunk.id]
                    answer.ids += chunk.ids
                    answer.times += [now] * len(chunk.ids)
            elif isinstance(message, Done):
                answer = self.answers[message.id]
                answer.ids += message.ids
                answer.ended = now
                self.left -= 1
                if int(message.id) in self.next:
                    self.send(self.next[int(message.id)])
            elif isinstance(message, Error):
                raise RuntimeError(f"request {message.id}: {message.code}: {message.message}")


def _message(number: int, ask: Ask, stream: bool) -> Generate:
    structure = None if ask.schema is None else StructuredOutputs(json=ask.schema)
    sampling = SamplingParams(
        temperature=float(number % 2),
        seed=number,
        max_tokens=ask.output_len,
        ignore_eos=structure is None,
        top_p=1.0,
        top_k=0,
        structured_outputs=structure,
    )
    return Generate(str(number), prompt_ids=ask.prompt_ids, sampling=sampling, stream=stream)
