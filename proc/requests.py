"""A tokenizer's requests: by number, by client and label, and by key for those that may outlive their client.

A request with `detach` seconds goes on without a client for that long, and its last word is kept as long after its end;
`attach` gives either to whoever brings the key. Knows no socket and no scheduler.
"""

from __future__ import annotations

import secrets

from ipc.errors import DuplicateId, InvalidRequest
from proc.conversation import NOBODY, Live
from proc.deadlines import Deadlines


class Requests:
    """Of tokenizer `index`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.live: dict[int, Live] = {}
        self._labels: dict[tuple[bytes, str], int] = {}
        self._ended: dict[int, Live] = {}  # with their last word
        self._leaving = Deadlines()
        self._next = 0

    def number(self, client: bytes, label: str) -> int | None:
        """Of the client's live request of that label."""
        return self._labels.get((client, label))

    def of(self, client: bytes) -> list[int]:
        return [number for number, live in self.live.items() if live.client == client]

    @property
    def clients(self) -> set[bytes]:
        return {live.client for live in self.live.values()} - {NOBODY}

    def add(self, live: Live) -> int:
        number = self.index << 56 | self._next
        self._next += 1
        self.live[number] = live
        self._labels[live.client, live.label] = number
        if live.message.detach:
            live.key = f"{self.index}-{number:x}-{secrets.token_hex(16)}"
        return number

    def remove(self, number: int, now: float) -> Live | None:
        """The one place where a request leaves the live ones; the first last word wins."""
        live = self.live.pop(number, None)
        if live is None:
            return None
        self._labels.pop((live.client, live.label), None)
        if live.key:
            self._ended[number] = live
            self._leave(number, live, now)
        return live

    def detach(self, number: int, now: float) -> None:
        """The client of a live request has gone; the request stays for a while."""
        live = self.live[number]
        self._labels.pop((live.client, live.label), None)
        live.client = NOBODY
        self._leave(number, live, now)

    def attach(self, key: str, offset: int, client: bytes, label: str) -> Live:
        """Give the request of that key to a client. Raises `InvalidRequest` or `DuplicateId`."""
        number = self._by_key(key)
        live = self.live.get(number) or self._ended[number]
        if not len(live.message.output_ids) <= offset <= len(live.ids):
            raise InvalidRequest(f"offset must be between {len(live.message.output_ids)} and {len(live.ids)}", "offset")
        if (client, label) in self._labels:
            raise DuplicateId(f"a request {label!r} of this client is live already", "id")
        self._labels.pop((live.client, live.label), None)
        live.client, live.label = client, label
        if number in self.live:
            self._labels[client, label] = number
        return live

    def holder(self, key: str) -> tuple[bytes, str] | None:
        """(client, label) of the live request of that key, while it has a client."""
        live = self.live.get(self._by_key(key))
        return None if live is None or live.client == NOBODY else (live.client, live.label)

    def expired(self, now: float) -> list[int]:
        """Live requests that nobody has come back for. Last words whose time is over are dropped."""
        due = self._leaving.due(now)
        for number in due:
            if number in self._ended and self._ended[number].leaves <= now:
                del self._ended[number]
        return [n for n in due if n in self.live and self.live[n].client == NOBODY and self.live[n].leaves <= now]

    def _by_key(self, key: str) -> int:
        _, _, rest = key.partition("-")
        try:
            number = int(rest.partition("-")[0], 16)
        except ValueError:
            number = -1
        live = self.live.get(number) or self._ended.get(number)
        if live is None or not secrets.compare_digest(live.key.encode(), key.encode()):
            raise InvalidRequest("there is no such request, or no longer", "key")
        return number

    def _leave(self, number: int, live: Live, now: float) -> None:
        live.leaves = now + live.message.detach
        self._leaving.set(number, live.leaves)
