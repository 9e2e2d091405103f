"""CPU seconds of a server's processes and threads, from /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from proc.supervisor import Supervisor

TICK = os.sysconf("SC_CLK_TCK")


def of(pid: int) -> float:
    """Seconds of a process so far."""
    return _seconds(Path("/proc") / str(pid))


def by_process(server: Supervisor) -> list[float]:
    """Of each process."""
    return [of(process.popen.pid) for process in server.processes]


def by_role(server: Supervisor) -> dict[str, float]:
    """Seconds so far. Where roles share a process each has its thread's, and `shared` is all the others'."""
    seconds: dict[str, float] = defaultdict(float)
    for process in server.processes:
        folder = Path("/proc") / str(process.popen.pid)
        whole = _seconds(folder)
        if len(process.roles) == 1:
            seconds[str(process.roles[0])] += whole
            continue
        for role in process.roles:
            mine = _seconds(folder / "task" / str(process.ready[str(role)]["thread"]))
            seconds[str(role)] += mine
            whole -= mine
        seconds["shared"] += whole
    return seconds


def _seconds(folder: Path) -> float:
    """User and system time: fields 14 and 15 of proc(5)'s stat; the name before them may hold spaces."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK
