"""The least that streaming over ASGI costs: our web server's settings, and an application that sends made events.

`python -m bench.bare_asgi TOKENS STEP_MS` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn
import uvloop

from ipc.messages import Chunk
from proc.http.answers import HEADERS, form
from proc.http.role import Protocol


class Steps:
    """All answers wait for the same moments, as the rows of a batch do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.turn = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.seconds, loop.time())
            await asyncio.sleep(due - loop.time())
            turn, self.turn = self.turn, asyncio.Event()
            turn.set()


async def serve(tokens: int, seconds: float) -> None:
    steps, event = Steps(seconds), form(False, "bare", "sim", False, [""]).more(0, [Chunk("", 0, "ab", [])], 0)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        for _ in range(tokens):
            await steps.turn.wait()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    server = uvicorn.Server(
        uvicorn.Config(application, port=0, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False)
    )
    asyncio.get_running_loop().add_reader(sys.stdin, setattr, server, "should_exit", True)
    ticking, serving = asyncio.create_task(steps.run()), asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving
    ticking.cancel()


def main() -> None:
    uvloop.install()
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))


if __name__ == "__main__":
    main()
