"""Which cores a process may use: those that `--cores` names; while a worker loads, the first is the worker's."""

from __future__ import annotations

import os
from contextlib import suppress

from proc.settings import UsageError
from proc.topology import ROLES, Role


def parse_cores(text: str | None) -> dict[str, list[int]]:
    """`worker=0-1,tokenizer=2` by role. Raises `UsageError` for a role or a core that is not there."""
    cores: dict[str, list[int]] = {}
    present = os.sched_getaffinity(0)
    for part in text.split(",") if text else []:
        name, _, span = part.partition("=")
        first, _, last = span.partition("-")
        if name not in ROLES or not first.isdecimal() or not (last or first).isdecimal():
            raise UsageError(f"--cores: {part!r} is not ROLE=CORE or ROLE=FIRST-LAST")
        wanted = list(range(int(first), int(last or first) + 1))
        if not wanted or not set(wanted) <= present:
            raise UsageError(f"--cores: {part!r}: this process may use the cores {sorted(present)}")
        cores.setdefault(name, []).extend(wanted)
    return cores


def computes(roles: tuple[Role, ...]) -> bool:
    """Whether a process has a worker among its roles."""
    return any(role.name == "worker" for role in roles)


def leave_first(pid: int) -> None:
    """Keep a process that has just been started off the first core, if there is another."""
    others = os.sched_getaffinity(0) - {min(os.sched_getaffinity(0))}
    if others:
        use(pid, others)


def use(pid: int, cores: set[int]) -> None:
    """Let all threads of a process use `cores`; a thread has begun with those of the one that started it."""
    with suppress(FileNotFoundError):  # a process that has died is noticed elsewhere
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)
