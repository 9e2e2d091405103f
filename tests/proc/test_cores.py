"""Cores by role, and the first one left to a worker that loads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from proc.cores import computes, leave_first, parse_cores, use
from proc.settings import UsageError
from proc.topology import Role

THREADS = "import sys, threading\nthreading.Thread(target=sys.stdin.read).start()\nprint('up', flush=True)"


def cores_of(pid: int) -> list[set[int]]:
    """Of each thread."""
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def test_cores_by_role() -> None:
    assert parse_cores(None) == {}
    assert parse_cores("worker=0,tokenizer=0-0") == {"worker": [0], "tokenizer": [0]}
    for bad in ("worker", "worker=x", "gpu=0", "worker=99999", "worker=1-0"):
        with pytest.raises(UsageError, match="--cores"):
            parse_cores(bad)


def test_a_process_computes_where_a_worker_is() -> None:
    assert computes((Role("tokenizer", 0), Role("worker", 0)))
    assert not computes((Role("tokenizer", 0), Role("scheduler", 0)))


def test_every_thread_of_a_process_leaves_the_first_core_and_gets_it_back() -> None:
    present = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        leave_first(process.pid)
        assert cores_of(process.pid) == [present - {min(present)} or present] * 2
        use(process.pid, present)
        assert cores_of(process.pid) == [present] * 2
        process.stdin.close()
    use(process.pid, present)  # has died: nothing to do
