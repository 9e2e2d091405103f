"""One server with HTTP for the tests of a file, and a plain way to ask it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from proc.settings import settings_from
from proc.supervisor import Supervisor

Start = Callable[..., Supervisor]


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of an event stream; the last is `[DONE]` as text."""
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [part if part == "[DONE]" else json.loads(part) for part in data]


def connection(server: Supervisor) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.partition("//")[2], timeout=30)


def ask(server: Supervisor, path: str, body: Any = None, method: str = "", **headers: str) -> Reply:
    """POST a body, or GET."""
    with closing(connection(server)) as line:
        return _ask(line, path, body, method, headers)


def _ask(line: http.client.HTTPConnection, path: str, body: Any, method: str, headers: dict[str, str]) -> Reply:
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    line.request(method or ("GET" if data is None else "POST"), path, data, names)
    reply = line.getresponse()
    return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


@pytest.fixture
def start(run_dir: Any) -> Iterator[Start]:
    """Starts servers that end with the test."""
    made: list[Supervisor] = []

    def begin(**changes: Any) -> Supervisor:
        made.append(Supervisor(settings_from(**({"device": "sim", "port": 0} | changes)), http=1))
        made[-1].start()
        return made[-1]

    yield begin
    for server in made:
        server.stop()
