"""The OpenAI-compatible endpoints as an ordinary front end of the public socket. Knows no engine and no process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from ipc.async_client import AsyncClient, AsyncStream
from ipc.errors import CannotConnect, InvalidRequest, ModelNotFound, ProcessDied, ShuttingDown
from ipc.exchange import Completion
from proc.http.answers import EventStream, form
from proc.http.errors import HttpError
from proc.http.guard import Guard, answer
from proc.http.metrics import text_of
from proc.http.openapi import document
from proc.http.schema import ChatBody, CompletionBody, DetokenizeBody, Sampled, TokenizeBody, read

LONGEST_BODY = 32 << 20  # bytes
BODY_TIME = 60.0  # seconds in which a body must have come
CONNECT_TIME = 10.0  # seconds that a request waits for the tokenizers
STUCK = 60.0  # seconds a step may take before the worker counts as stuck
FRESH = 5.0  # seconds in which the scheduler must answer, and an idle worker and the grammar process say a word
PAGE = Path(__file__).parent / "page.html"
T = TypeVar("T")


class Api:
    """Its methods are the routes. `client` is there once the tokenizers are."""

    def __init__(self, write_timeout: float) -> None:
        self.write_timeout = write_timeout
        self.client: AsyncClient | None = None
        self.connected = asyncio.Event()
        self.draining = False
        self.active = 0  # answers under way
        self.started = int(time.time())

    # -- the model's

    async def completions(self, request: Request) -> Any:
        body = await self._read(request, CompletionBody)
        client = await self._client(body.model)
        prompts = body.prompts()
        prefixes = [await self._echo(prompt) if body.echo else "" for prompt in prompts for _ in range(body.choices)]
        asks = [(prompt, None, body.sampling(choice)) for prompt in prompts for choice in range(body.choices)]
        return await self._answer(request, client, body, False, prefixes, asks, {})

    async def chat(self, request: Request) -> Any:
        body = await self._read(request, ChatBody)
        client = await self._client(body.model)
        asks = [(None, body.conversation(), body.sampling(choice)) for choice in range(body.choices)]
        return await self._answer(request, client, body, True, [""] * len(asks), asks, body.wishes())

    async def _answer(
        self,
        request: Request,
        client: AsyncClient,
        body: Sampled,
        chat: bool,
        prefixes: list[str],
        asks: list[tuple[Any, Any, Any]],
        wishes: dict[str, Any],
    ) -> Any:
        if self.draining:
            raise ShuttingDown("the server is shutting down")
        usage = bool(body.stream_options and body.stream_options.include_usage)
        shape = form(chat, request.state.request_id, client.model, usage, prefixes)
        wishes = wishes | {"priority": body.priority or 0, "timeout_ms": body.timeout_ms}
        last = request.headers.get("last-event-id")
        detach = _detach(request, body, len(asks))
        if last is not None:
            key, _, offset = last.rpartition(":")
            if not offset.isdecimal():
                raise InvalidRequest("Last-Event-ID is none of ours", "Last-Event-ID")
            streams = [await client.attach(key, int(offset))]
            return Counted(self, EventStream(streams, shape, 1, self.write_timeout, int(offset)))
        if body.stream:
            streams = [await self._stream(client, ask, wishes | {"detach": detach}) for ask in asks]
            return Counted(self, EventStream(streams, shape, body.choices, self.write_timeout, 0 if detach else None))
        calls = [self._whole(client, ask, wishes) for ask in asks]
        answers: list[Completion] = await self._unless_gone(request, _all(calls))
        request.state.times = shape.times(answers)
        return Response(shape.whole(answers, body.choices), media_type="application/json")

    async def _stream(self, client: AsyncClient, ask: tuple[Any, Any, Any], wishes: dict[str, Any]) -> AsyncStream:
        prompt, messages, sampling = ask
        return await client.stream(prompt, messages=messages, sampling_params=sampling, **wishes)

    async def _whole(self, client: AsyncClient, ask: tuple[Any, Any, Any], wishes: dict[str, Any]) -> Completion:
        prompt, messages, sampling = ask
        if messages is not None:
            return await client.chat(messages, sampling_params=sampling, **wishes)
        return await client.generate(prompt, sampling_params=sampling, **wishes)

    async def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else await (await self._client(None)).detokenize(prompt)

    async def _unless_gone(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client goes away."""
        self.active += 1
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            self.active -= 1
            for one in (task, watcher):
                one.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    # -- the vocabulary's

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeBody)
        client = await self._client(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is needed", "prompt")
        special = body.add_special_tokens is not False
        ids = await client.tokenize(body.prompt, special, messages=body.messages)
        return _json({"count": len(ids), "max_model_len": client.max_model_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeBody)
        return _json({"prompt": await (await self._client(body.model)).detokenize(body.tokens)})

    # -- the server's

    async def models(self, request: Request) -> Response:
        client = await self._client(None)
        model = {"id": client.model, "object": "model", "created": self.started, "owned_by": "sidestep"}
        return _json({"object": "list", "data": [model | {"max_model_len": client.max_model_len}]})

    async def version(self, request: Request) -> Response:
        return _json({"version": version("sidestep")})

    async def health(self, request: Request) -> Response:
        """200 when all schedulers have answered just now, all others live, and no worker sits on a step."""
        try:
            status = await asyncio.wait_for((await self._client(None)).status(), FRESH)
        except asyncio.TimeoutError:
            raise ProcessDied(f"no scheduler has answered within {FRESH:.0f} s") from None
        if status["oldest_step_s"] > STUCK:
            raise ProcessDied(f"a step has been under way for {status['oldest_step_s']:.0f} s")
        if status["worker_silence_s"] > FRESH:
            raise ProcessDied(f"a worker has said nothing for {status['worker_silence_s']:.0f} s")
        if status["grammar_silence_s"] > FRESH:
            raise ProcessDied(f"a grammar process has said nothing for {status['grammar_silence_s']:.0f} s")
        return Response()

    async def ready(self, request: Request) -> Response:
        if self.draining or not self.connected.is_set():
            raise ShuttingDown("not ready")
        return Response()

    async def metrics(self, request: Request) -> Response:
        client = await self._client(None)
        return Response(text_of(await client.metrics(), client.model), media_type="text/plain; version=0.0.4")

    async def status(self, request: Request) -> Response:
        return _json(await (await self._client(None)).status())

    async def trace(self, request: Request) -> Response:
        """The times of the last `?last=` steps."""
        last = request.query_params.get("last", "4096")
        if not last.isdecimal():
            raise InvalidRequest("last must be a number", "last")
        return _json(await (await self._client(None)).trace(min(int(last), 4096)))

    async def openapi(self, request: Request) -> Response:
        return _json(document())

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8")

    # -- helpers

    async def _client(self, model: str | None) -> AsyncClient:
        """Raises `CannotConnect` before the tokenizers are there, `ModelNotFound` for another model's name."""
        try:
            await asyncio.wait_for(self.connected.wait(), CONNECT_TIME)
        except asyncio.TimeoutError:
            raise CannotConnect("the server is still starting") from None
        assert self.client is not None
        if model is not None and model != self.client.model:
            raise ModelNotFound(f"the model here is {self.client.model}, not {model}", "model")
        return self.client

    async def _read(self, request: Request, kind: type[T]) -> T:
        try:
            body = read(await asyncio.wait_for(_body(request), BODY_TIME), kind)
        except asyncio.TimeoutError:
            raise HttpError(408, "timeout_error", "request_timeout", "the body did not come in time") from None
        if isinstance(body, Sampled):
            request.state.names = body.names
            body.check()
        return body


class Counted:
    """A streamed answer that counts among those under way."""

    def __init__(self, api: Api, response: EventStream) -> None:
        self.api, self.response = api, response

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.api.active += 1
        try:
            await self.response(scope, receive, send)
        finally:
            self.api.active -= 1


def application(api: Api, keys: list[bytes], cors_origins: str | None, log_requests: bool) -> Any:
    """The ASGI application. CORS answers preflights before a key is asked for."""
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        *(
            Route(f"/{name}", getattr(api, name))
            for name in ("version", "health", "ready", "metrics", "status", "trace")
        ),
        Route("/v1/models", api.models),
        Route("/openapi.json", api.openapi),
        Route("/", api.page),
    ]
    middleware = [Middleware(Guard, keys=keys, log_requests=log_requests)]
    if cors_origins:
        origins = [origin.strip() for origin in cors_origins.split(",")]
        expose = ["x-request-id"]
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=expose
            ),
        )
    return Starlette(routes=routes, middleware=middleware, exception_handlers={404: _not_found, 405: _not_allowed})


async def _not_found(request: Request, error: Exception) -> Any:
    return _Error(HttpError(404, "not_found_error", "not_found", f"there is no {request.url.path}"))


async def _not_allowed(request: Request, error: Exception) -> Any:
    words = f"{request.url.path} does not take {request.method}"
    allowed: str = error.headers["Allow"]  # type: ignore[attr-defined]
    return _Error(HttpError(405, "invalid_request_error", "method_not_allowed", words, allow=allowed))


class _Error(Response):
    def __init__(self, error: HttpError) -> None:
        super().__init__()
        self.error = error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await answer(send, self.error)


def _detach(request: Request, body: Sampled, streams: int) -> float:
    """Seconds of X-Sidestep-Detach, 0 without. Raises `InvalidRequest`."""
    given = request.headers.get("x-sidestep-detach")
    if given is None:
        return 0.0
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 3600 or not body.stream or streams != 1:
        raise InvalidRequest("X-Sidestep-Detach takes up to 3600 seconds, for one streamed choice", "X-Sidestep-Detach")
    return seconds


async def _body(request: Request) -> bytes:
    """Raises `HttpError` as soon as more has come than is taken."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LONGEST_BODY:
            words = f"the body is larger than {LONGEST_BODY >> 20} MiB"
            raise HttpError(413, "invalid_request_error", "body_too_large", words)
        parts.append(part)
    return b"".join(parts)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _all(calls: list[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """All results; the first error ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
