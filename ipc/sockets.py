"""Typed one-way sockets: msgspec structs over ZMQ PUSH and PULL. Knows no message in particular.

Both ends are bounded, neither waits without a time-out, and nothing lingers at the end. A frame that does not decode
is counted and dropped; it never ends a loop.
"""

from __future__ import annotations

import math
import os
from typing import Any, Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")
HIGH_WATER = 10_000  # messages queued before a sender waits
MAX_FRAME = 256 << 20  # bytes; more closes the connection


class Sender(Generic[T]):
    """Connects to `address`. Raises `TimeoutError` when the receiver takes nothing for `timeout` seconds."""

    def __init__(self, address: str, timeout: float = 60.0) -> None:
        self.socket = _socket(zmq.PUSH)
        self.socket.set(zmq.SNDTIMEO, int(timeout * 1000))
        self.socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: T) -> None:
        try:
            self.socket.send(self._encoder.encode(message))
        except zmq.Again:
            raise TimeoutError("the receiving process takes no more messages") from None

    def close(self) -> None:
        self.socket.close()


class Receiver(Generic[T]):
    """Binds `address`; `kind` is the struct (or union) that arrives there.

    Raises `OSError` where an `ipc://` path exists already: ZMQ itself would steal it without a word.
    """

    def __init__(self, address: str, kind: Any) -> None:
        if address.startswith("ipc://") and os.path.exists(address.removeprefix("ipc://")):
            raise FileExistsError(f"{address} is bound already")
        self.dropped = 0  # frames that did not decode
        self.socket = _socket(zmq.PULL)
        self.socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def receive(self, timeout: float) -> T | None:
        """The next message, or None when none has come within `timeout` seconds."""
        while not timeout or self.socket.poll(math.ceil(timeout * 1000)):
            try:
                return self._decoder.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except (msgspec.MsgspecError, RecursionError):
                self.dropped += 1
        return None

    def close(self) -> None:
        self.socket.close()


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.set(zmq.SNDHWM, HIGH_WATER)
    socket.set(zmq.RCVHWM, HIGH_WATER)
    return socket
