"""Errors in OpenAI's shape, and the HTTP status of each. Knows no route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ipc import errors
from ipc.errors import SidestepError

STATUS: dict[type[SidestepError], tuple[int, str]] = {
    errors.ModelNotFound: (404, "not_found_error"),
    errors.QueueFull: (429, "rate_limit_error"),
    errors.TimedOut: (504, "timeout_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.LostProcess: (503, "service_unavailable_error"),
    SidestepError: (500, "server_error"),
}
NAMES = {"prompt_ids": "prompt", "text": "prompt", "ids": "tokens"}  # the socket's field → HTTP's
RETRY_AFTER = {429: "1", 503: "5"}  # seconds


class HttpError(SidestepError):
    """One that only HTTP knows."""

    def __init__(self, status: int, kind: str, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.headers = status, kind, code, headers


def status_of(error: SidestepError) -> tuple[int, str]:
    """(HTTP status, OpenAI's type): that of the nearest class in the tree."""
    if isinstance(error, HttpError):
        return error.status, error.kind
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def error_body(error: SidestepError, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`names`: the body's own for some fields of the socket."""
    message, kind, param = str(error), status_of(error)[1], error.param
    if param and names and param in names:
        message, param = message.replace(param, names[param], 1), names[param]
    param = param and NAMES.get(param, param)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}
