"""Which cores a process may use: those that `--cores` names; while a worker loads, the first is the worker's.

When it has loaded, each thread that computes has a core of its own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from proc.settings import UsageError
from proc.topology import ROLES, Role

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
PLACED = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")  # whoever sets one of these places the threads himself


def parse_cores(text: str | None) -> dict[str, list[int]]:
    """`worker=0-1,tokenizer=2` by role. Raises `UsageError` for a role or a core that is not there."""
    cores: dict[str, list[int]] = {}
    present = os.sched_getaffinity(0)
    for part in text.split(",") if text else []:
        name, _, span = part.partition("=")
        first, _, last = span.partition("-")
        if name not in ROLES or not first.isdecimal() or not (last or first).isdecimal():
            raise UsageError(f"--cores: {part!r} is not ROLE=CORE or ROLE=FIRST-LAST")
        wanted = range(int(first), int(last or first) + 1)
        if not wanted or not all(core in present for core in wanted):  # stops at the first, however long
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


def spread(threads: list[int], rank: int, size: int) -> None:
    """Give each compute thread of the `rank`-th of `size` processes a core, if there is one for each thread of all.

    Left to itself the system now and then lets two of them share a core for as long as a step, and the others wait.
    """
    homes = _homes(len(threads) * size)
    if homes and not any(name in os.environ for name in PLACED):
        for thread, cores in zip(threads, homes[len(threads) * rank :], strict=False):
            os.sched_setaffinity(thread, cores)


def _homes(count: int) -> list[set[int]]:
    """`count` cores, each as its hardware threads' numbers, or `count` hardware threads; of another count none."""
    allowed = os.sched_getaffinity(0)
    whole = {frozenset(_siblings(number) & allowed) for number in allowed}
    for homes in (whole, [{number} for number in allowed]):
        if len(homes) == count:
            return sorted((set(home) for home in homes), key=min)
    return []


def _siblings(number: int) -> set[int]:
    try:
        spans = Path(SIBLINGS.format(number)).read_text().strip().split(",")
    except OSError:  # a sandbox without /sys
        return {number}
    ends = [span.partition("-") for span in spans]
    return {one for first, _, last in ends for one in range(int(first), int(last or first) + 1)}


def use(pid: int, cores: set[int]) -> None:
    """Let all threads of a process use `cores`; a thread has begun with those of the one that started it."""
    with suppress(FileNotFoundError):  # a process that has died is noticed elsewhere
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)
