"""The http process: a web server in a loop of its own, a front end of the public socket like any other."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ipc.async_client import AsyncClient
from proc.http.app import Api, application
from proc.http.guard import api_keys
from proc.role import Command, Poller, ProcessSpec

KEEP_ALIVE = 90  # seconds; above what clients pool their connections for
HEAD_TIME = 30.0  # seconds in which a request's head must have come
LAST_WORDS = 2.0  # seconds that answers get to leave when the server ends


class Protocol(HttpToolsProtocol):
    """A connection on which no whole head comes in time is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_TIME, transport.close)

    def on_headers_complete(self) -> None:
        self._late.cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)


class HttpLoop:
    """Runs the web server between two commands."""

    finished = False

    def __init__(self, spec: ProcessSpec, index: int) -> None:
        self.spec = spec
        self.sockets: list[Any] = []
        self.loop = uvloop.new_event_loop()
        settings = spec.settings
        self.api = Api(settings.write_timeout)
        app = application(self.api, api_keys(settings.api_key), settings.cors_origins, settings.enable_log_requests)
        self.server = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="none",
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
            )
        )

    def start(self) -> dict[str, Any]:
        """Accept requests; they wait for the tokenizers."""
        listening = socket.socket(fileno=os.dup(self.spec.http_socket))
        asyncio.set_event_loop(self.loop)
        self.serving = self.loop.create_task(self.server.serve([listening]))
        self.loop.run_until_complete(asyncio.sleep(0))
        return {}

    def turn(self, poller: Poller) -> None:
        """Serve until there is a command."""
        self.loop.run_until_complete(self._until(poller.control.fd))

    async def _until(self, fd: int) -> None:
        command: asyncio.Future[None] = self.loop.create_future()
        self.loop.add_reader(fd, _settle, command)
        try:
            await asyncio.wait({command, self.serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.loop.remove_reader(fd)
        if self.serving.done():
            self.serving.result()
            raise RuntimeError("the web server has ended")

    def command(self, command: Command) -> None:
        """`addresses`: the tokenizers are there. `drain` and `fail`: no new requests; the tokenizers end the others."""
        if command.kind == "addresses":
            self.loop.run_until_complete(self._connect(command.message))
        else:
            self.api.draining = True

    async def _connect(self, addresses: str) -> None:
        self.api.client = AsyncClient(addresses)
        await self.api.client.connect()
        self.api.connected.set()

    def close(self) -> None:
        self.loop.run_until_complete(self._end())
        self.loop.close()

    async def _end(self) -> None:
        deadline = self.loop.time() + LAST_WORDS
        while self.api.active and self.loop.time() < deadline:
            await asyncio.sleep(0.01)
        if self.api.client is not None:
            await self.api.client.close()
        self.server.should_exit = self.server.force_exit = True
        await asyncio.wait({self.serving}, timeout=LAST_WORDS)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
