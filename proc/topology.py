"""How the roles are spread over processes: `--procs` read into data. Knows no process.

The same role code runs under every layout; a layout is a list of processes, each a list of (role, index).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from proc.settings import UsageError

ROLES = ("tokenizer", "scheduler", "worker", "http")


@dataclass(frozen=True, order=True)
class Role:
    name: str
    index: int

    def __str__(self) -> str:
        return f"{self.name}-{self.index}"


@dataclass(frozen=True)
class Topology:
    """`processes` in the order in which they are shown; every scheduler has the worker and the grammar of its index."""

    processes: tuple[tuple[Role, ...], ...]

    def count(self, name: str) -> int:
        return sum(role.name == name for process in self.processes for role in process)


def parse(procs: str, http: int = 0) -> Topology:
    """Read `--procs`; `http` is the number of http processes where it names none.

    Raises `UsageError` with the reason for a layout that cannot be met.
    """
    try:
        number = int(procs)
    except ValueError:
        return _by_role({"http": http} | _counts(procs))
    return _by_number(number, http)


def _by_number(number: int, http: int) -> Topology:
    if not 1 <= number <= 64:
        raise UsageError(f"--procs {number}: between 1 and 64 processes")
    tokenizer, scheduler, worker, grammar = (Role(name, 0) for name in ("tokenizer", "scheduler", "worker", "grammar"))
    web = tuple(Role("http", index) for index in range(http))
    if number == 1:
        return Topology(((tokenizer, scheduler, worker, grammar, *web),))
    if number == 2:
        return Topology(((tokenizer, scheduler), (worker,), (grammar,), *((role,) for role in web)))
    return _by_role({"tokenizer": number - 2, "http": http})


def _by_role(counts: dict[str, int]) -> Topology:
    replicas = counts.get("scheduler", 1)
    names = ("tokenizer",) * counts.get("tokenizer", 1) + ("scheduler",) * replicas + ("worker",) * replicas
    names += ("grammar",) * replicas + ("http",) * counts.get("http", 0)
    seen: dict[str, int] = {}
    processes = []
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        processes.append((Role(name, seen[name]),))
    return Topology(tuple(processes))


def _counts(procs: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in procs.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in ROLES:
            close = difflib.get_close_matches(name, ROLES, 1)
            hint = f" (did you mean {close[0]}?)" if close else f"; roles are {', '.join(ROLES)}"
            raise UsageError(f"--procs: unknown role {name!r}{hint}")
        if name in counts:
            raise UsageError(f"--procs: {name} is named twice")
        if not equals or not number.isdecimal():
            raise UsageError(f"--procs: {name} needs a number, as in {name}=1")
        counts[name] = int(number)
    _refuse(counts)
    return counts


def _refuse(counts: dict[str, int]) -> None:
    for name in ("tokenizer", "scheduler", "worker"):
        if not 1 <= counts.get(name, 1) <= 64:
            raise UsageError(f"--procs: {name}={counts[name]}, between 1 and 64 are needed")
    if counts.get("worker", 1) > 1:
        raise UsageError("--procs: worker above 1 is tensor parallelism, which this version does not have")
    if counts.get("http", 0) > 64:
        raise UsageError(f"--procs: http={counts['http']}, at most 64 are possible")
