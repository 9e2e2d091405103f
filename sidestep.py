"""The front door: Client, AsyncClient, LLM, SamplingParams and the errors, each loaded when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipc.async_client import AsyncClient as AsyncClient
    from ipc.client import Client as Client
    from ipc.errors import SidestepError as SidestepError
    from ipc.exchange import Completion as Completion
    from ipc.sampling_params import SamplingParams as SamplingParams
    from ipc.sampling_params import StructuredOutputs as StructuredOutputs
    from proc.llm import LLM as LLM
    from proc.settings import UsageError as UsageError
    from proc.supervisor import StartError as StartError

_ERRORS = (
    *("SidestepError", "RequestError", "InvalidRequest", "PromptTooLong", "ModelNotFound", "DuplicateId", "QueueFull"),
    *("DeadlineExceeded", "Aborted", "LostProcess", "ProcessDied", "ShuttingDown"),
    *("CannotConnect", "TimedOut", "InternalError"),
)
_HOMES = {
    "AsyncClient": "ipc.async_client",
    "Client": "ipc.client",
    "Completion": "ipc.exchange",
    "LLM": "proc.llm",
    "SamplingParams": "ipc.sampling_params",
    "StartError": "proc.supervisor",
    "StructuredOutputs": "ipc.sampling_params",
    "UsageError": "proc.settings",
} | dict.fromkeys(_ERRORS, "ipc.errors")
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sidestep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
