"""Which cores a process may use: those that `--cores` names; while a worker loads, the first is the worker's.

When it has loaded, each thread that computes has a core of its own; several workers divide the cores.
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
    """`worker=0-1,tokenizer=2` by role; one named twice has both. Raises `UsageError` for what is not there."""
    cores: dict[str, list[int]] = {}
    present = os.sched_getaffinity(0)
    for part in [] if text is None else text.split(","):
        name, _, span = part.partition("=")
        first, dash, last = span.partition("-")
        if not span.isascii() or not first.isdecimal() or not (last if dash else first).isdecimal():
            raise UsageError(f"--cores: {part!r} is not ROLE=CORE or ROLE=FIRST-LAST")
        if name not in ROLES:
            raise UsageError(f"--cores: no role {name!r}; roles are {', '.join(ROLES)}")
        wanted = range(int(first), int(last or first) + 1)
        if not wanted:
            raise UsageError(f"--cores: {part!r} ends before it begins")
        if not all(core in present for core in wanted):  # stops at the first, however long
            raise UsageError(f"--cores: {part!r}: this process may use the cores {sorted(present)}")
        cores[name] = sorted({*cores.get(name, []), *wanted})
    return cores


def computes(roles: tuple[Role, ...]) -> bool:
    """Whether a process has a worker among its roles."""
    return any(role.name == "worker" for role in roles)


def leave_first(pid: int) -> None:
    """Keep a process that has just been started off the first core, if there is another."""
    others = os.sched_getaffinity(0) - {min(os.sched_getaffinity(0))}
    if others:
        use(pid, others)


def share(threads: int, workers: int) -> int:
    """Compute threads of each of `workers` processes, which divide `threads`, torch's for the machine, and its cores.

    `OMP_NUM_THREADS` is the wish of each. Who binds threads to places has as many as torch says: OpenMP has bound the
    one that asks already, whose cores are no longer those of the process.
    """
    if _placed() and os.environ.get("OMP_PROC_BIND", "").lower() != "false":
        return threads
    wished = threads if os.environ.get("OMP_NUM_THREADS") else threads // workers
    return max(1, min(wished, len(os.sched_getaffinity(0)) // workers))


def spread(threads: list[int], index: int, workers: int) -> bool:
    """Give each compute thread of the `index`-th of `workers` processes a core, if there is one for each thread of all.

    Left to itself the system now and then lets two of them share a core for as long as a step, and the others wait.
    """
    homes = _homes(len(threads) * workers)
    if not homes or _placed():
        return False
    for thread, cores in zip(threads, homes[len(threads) * index :], strict=False):
        os.sched_setaffinity(thread, cores)
    return True


def _placed() -> bool:
    return any(os.environ.get(name) for name in PLACED)


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
