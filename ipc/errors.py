"""What can go wrong, as a caller sees it. Knows nothing but the codes of the wire.

SidestepError
├── RequestError            the caller's mistake, or wish
│   ├── InvalidRequest      invalid_request   a field is missing, unknown or impossible; `param` names it
│   ├── PromptTooLong       prompt_too_long
│   ├── ModelNotFound       model_not_found
│   ├── DuplicateId         duplicate_id      the client has a live request of that id
│   ├── QueueFull           queue_full        try again later
│   ├── Aborted             aborted
│   └── DeadlineExceeded    deadline_exceeded the request's own timeout_ms is over
├── LostProcess             a process or the way to it is gone; the request may be sent again
│   ├── ProcessDied         process_died
│   ├── ShuttingDown        shutting_down
│   ├── CannotConnect       cannot_connect
│   └── TimedOut            timed_out
└── InternalError           internal          our own broken invariant; please report it
"""

from __future__ import annotations


class SidestepError(Exception):
    """`code` is the wire's word for the class; `param` the field at fault, where there is one."""

    code = ""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestError(SidestepError):
    pass


class InvalidRequest(RequestError):
    code = "invalid_request"


class PromptTooLong(RequestError):
    code = "prompt_too_long"


class ModelNotFound(RequestError):
    code = "model_not_found"


class DuplicateId(RequestError):
    code = "duplicate_id"


class QueueFull(RequestError):
    code = "queue_full"


class Aborted(RequestError):
    code = "aborted"


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"


class LostProcess(SidestepError):
    pass


class ProcessDied(LostProcess):
    code = "process_died"


class ShuttingDown(LostProcess):
    code = "shutting_down"


class CannotConnect(LostProcess):
    code = "cannot_connect"


class TimedOut(LostProcess):
    code = "timed_out"


class InternalError(SidestepError):
    code = "internal"


def _leaves(branch: type[SidestepError]) -> list[type[SidestepError]]:
    below = branch.__subclasses__()
    return [leaf for child in below for leaf in _leaves(child)] if below else [branch]


BY_CODE: dict[str, type[SidestepError]] = {leaf.code: leaf for leaf in _leaves(SidestepError)}


def from_wire(code: str, message: str, param: str | None = None) -> SidestepError:
    """The error of a code; a code of a later version is an `InternalError` that names it."""
    kind = BY_CODE.get(code)
    return kind(message, param) if kind else InternalError(f"{code}: {message}", param)
