"""What stands before every route: the request's id, the key, the log line, and errors in one shape. Plain ASGI."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect

from ipc.errors import InternalError, SidestepError
from proc.http.errors import RETRY_AFTER, HttpError, error_body, status_of
from proc.settings import UsageError

log = logging.getLogger(__name__)
requests = logging.getLogger("sidestep.requests")
requests.setLevel(logging.INFO)  # opted in by a flag of its own, whatever --log-level says
OPEN = ("/health", "/ready", "/")  # asked without a key; the page holds no secret and has a field for the key
QUIET = ("/health", "/ready", "/metrics", "/status", "/trace")  # not in the log
GONE = 499  # in the log, as nginx has it: the client left before there was an answer
LONGEST_ID = 128  # characters of an X-Request-Id that is taken over


def api_keys(setting: str | None) -> list[bytes]:
    """The keys of `--api-key`. Raises `UsageError` for a file that cannot be read or that holds none."""
    if setting is None:
        return []
    text = setting
    if setting.startswith("@"):
        try:
            text = Path(setting[1:]).read_text("utf-8").replace("\n", ",")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key {setting}: {error}") from None
    keys = [key.strip().encode() for key in text.split(",") if key.strip()]
    if not keys:
        raise UsageError("--api-key holds no key")
    return keys


class Guard:
    """Around `app`. `keys` empty: everybody may ask."""

    def __init__(self, app: Any, keys: list[bytes], log_requests: bool) -> None:
        self.app, self.keys, self.log_requests = app, keys, log_requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        headers = dict(scope["headers"])
        request_id = scope.setdefault("state", {})["request_id"] = _request_id(headers.get(b"x-request-id", b""))

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        scope["state"]["send"] = send  # for what follows a start, which none of the layers inside looks at
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            await self.app(scope, receive, sending)
        except SidestepError as error:
            if status:
                raise  # too late for a status
            await answer(sending, error, scope["state"].get("names"))
        except ClientDisconnect:
            status = GONE
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await answer(sending, InternalError("the server has a fault; its log says more"))
        if self.log_requests and scope["path"] not in QUIET:
            seconds = time.perf_counter() - began
            hops = " ".join(f"{name} {value:.4f}" for name, value in scope["state"].get("times", {}).items())
            requests.info("%s %s %d %.3f s %s %s", scope["method"], scope["path"], status, seconds, request_id, hops)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if not self.keys or path in OPEN:
            return
        kind, _, given = authorization.partition(b" ")
        # every key is compared, so that the time taken says nothing
        if kind.lower() != b"bearer" or not sum(hmac.compare_digest(given.strip(), key) for key in self.keys):
            words = "a valid API key is needed"
            raise HttpError(401, "authentication_error", "invalid_api_key", words, **{"www-authenticate": "Bearer"})


async def answer(send: Any, error: SidestepError, names: Mapping[str, str] | None = None) -> None:
    """An error as the whole response; `names`: the body's own for some fields of the socket."""
    status, _ = status_of(error)
    body = msgspec.json.encode(error_body(error, names))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, HttpError):
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    if status in RETRY_AFTER:
        headers.append((b"retry-after", RETRY_AFTER[status].encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _request_id(given: bytes) -> str:
    """The caller's where it is short and printable, else one of our own."""
    text = given.decode("latin-1")
    fine = 0 < len(text) <= LONGEST_ID and text.isascii() and text.isprintable()
    return text if fine else uuid.uuid4().hex
