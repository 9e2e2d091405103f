"""The public socket of a tokenizer: a ZMQ ROUTER with an outbox per client. Knows messages, not requests.

Chunks for one client are gathered until `flush`, and further while the client is slow to read; one that falls too far
behind, or has gone, is reported by `flush` and forgotten.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import zmq

from ipc.errors import SidestepError
from ipc.messages import MAX_FRAME, Chunk, Chunks, Error, ToClient, encode

SLOW = 20_000  # chunks waiting for one client before it is given up
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")


class PublicSocket:
    """Bound to `wanted`; tokenizer `index` above 0 takes that TCP port + index, or that path with the index behind it.

    `address` is what was bound.

    Raises `ValueError` for an address beyond the loopback, `OSError` for one that is taken.
    """

    def __init__(self, wanted: str, index: int = 0) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 2000)
        self.socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(_checked(wanted, index))
        self.address: str = self.socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.dropped = 0  # messages with another number of frames
        self._outboxes: dict[bytes, list[ToClient | list[Chunk]]] = {}

    @property
    def backlog(self) -> bool:
        """Some client has not yet taken what is meant for it."""
        return bool(self._outboxes)

    def receive(self) -> tuple[bytes, bytes] | None:
        """(client, frame) of the next message, or None when there is none."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) == 2:
                return frames[0], frames[1]
            self.dropped += 1

    def send(self, client: bytes, message: ToClient) -> None:
        self._outboxes.setdefault(client, []).append(message)

    def chunk(self, client: bytes, chunk: Chunk) -> None:
        outbox = self._outboxes.get(client)
        if outbox is None:
            self._outboxes[client] = [[chunk]]
        elif isinstance(outbox[-1], list):
            outbox[-1].append(chunk)
        else:
            outbox.append([chunk])

    def error(self, client: bytes, label: str | None, error: SidestepError) -> None:
        self.send(client, Error(error.code, str(error), label, error.param))

    def probe(self, client: bytes) -> None:
        """An empty message, so that a client that has gone is noticed."""
        if client not in self._outboxes:
            self.send(client, Chunks([]))

    def flush(self) -> list[bytes]:
        """Send what the clients will take; returns those that have gone or are too slow."""
        lost = [client for client in list(self._outboxes) if not self._flush(client)]
        for client in lost:
            del self._outboxes[client]
        return lost

    def _flush(self, client: bytes) -> bool:
        outbox = self._outboxes[client]
        sent = 0
        try:
            for entry in outbox:
                message = Chunks(entry) if isinstance(entry, list) else entry
                self.socket.send_multipart((client, encode(message)), zmq.NOBLOCK)
                sent += 1
        except zmq.Again:
            del outbox[:sent]
            return sum(len(entry) if isinstance(entry, list) else 1 for entry in outbox) < SLOW
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        del self._outboxes[client]
        return True

    def close(self) -> None:
        self.socket.close()


def _checked(wanted: str, index: int) -> str:
    parts = urlsplit(wanted)
    if parts.scheme == "ipc":
        path = wanted.removeprefix("ipc://") + (f".{index}" if index else "")
        if os.path.exists(path):
            raise ValueError("the path exists already")
        return f"ipc://{path}"
    host, _, port = parts.netloc.rpartition(":")
    if parts.scheme != "tcp" or not (port == "*" or port.isdecimal()):
        raise ValueError("it is neither ipc://PATH nor tcp://HOST:PORT")
    if host not in LOOPBACK:
        raise ValueError("it is not on the loopback; this version serves no other")
    return f"tcp://{host}:{'*' if port in ('*', '0') else int(port) + index}"
