"""Cores by role, the first one left to a worker that loads, and one for each thread that computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import proc.cores
from proc.cores import PLACED, computes, leave_first, parse_cores, share, spread, use
from proc.settings import UsageError
from proc.topology import Role

PLACE = """
import os, torch
from proc.cores import spread
from runtime.kernels.library import compute_threads
present = os.sched_getaffinity(0)
torch.set_num_threads(len(present))
torch.ones(512, 512) @ torch.ones(512, 512)
threads = compute_threads(len(present))
placed = spread(threads, 0, 1)
print(*[sorted(os.sched_getaffinity(one)) for one in (0, *threads)], threads[0] == os.getpid(), placed)
"""
THREADS = "import sys, threading\nthreading.Thread(target=sys.stdin.read).start()\nprint('up', flush=True)"


def cores_of(pid: int) -> list[set[int]]:
    """Of each thread."""
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def test_cores_by_role() -> None:
    assert parse_cores(None) == {}
    assert parse_cores("worker=0,tokenizer=0-0,worker=0") == {"worker": [0], "tokenizer": [0]}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("", "not ROLE=CORE"),
        ("worker", "not ROLE=CORE"),
        ("worker=x", "not ROLE=CORE"),
        ("worker=0-", "not ROLE=CORE"),
        ("worker=\u0663", "not ROLE=CORE"),
        ("gpu=0", "no role 'gpu'; roles are tokenizer, scheduler, worker, http"),
        ("worker=1-0", "ends before it begins"),
        ("worker=99999", "may use the cores"),
        (f"worker=0-{10**14}", "may use the cores"),
    ],
)
def test_cores_that_cannot_be_had_are_refused(bad: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"^--cores: .*{why}"):
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


def test_each_thread_that_computes_has_a_core() -> None:
    """In a process of its own, since a thread's cores are those of all that it starts."""
    clean = {name: value for name, value in os.environ.items() if name not in PLACED}
    present = sorted(os.sched_getaffinity(0))
    ours = subprocess.run([sys.executable, "-c", PLACE], env=clean, capture_output=True, text=True, check=True).stdout
    assert ours == " ".join(str([core]) for core in (present[0], *present)) + " True True\n"
    told = clean | {"OMP_PROC_BIND": "false", "OMP_PLACES": ""}
    theirs = subprocess.run([sys.executable, "-c", PLACE], env=told, capture_output=True, text=True, check=True).stdout
    assert theirs == f"{present} " * (len(present) + 1) + "True False\n"


def test_workers_divide_the_threads_and_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name in ("OMP_NUM_THREADS", *PLACED):
        monkeypatch.delenv(name, raising=False)
    assert share(4, 1) == 4 and share(16, 1) == 8 and share(4, 2) == 2 and share(1, 2) == 1 and share(4, 5) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert share(8, 1) == 8 and share(16, 1) == 8 and share(8, 2) == 4 and share(3, 2) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # of the first thread, which OpenMP has bound
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert share(8, 1) == 8 and share(8, 2) == 8
    monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
    assert share(8, 1) == 1


def test_threads_are_placed_by_whole_cores_and_by_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    placed: list[tuple[int, set[int]]] = []
    for number in range(8):  # four cores with two hardware threads each
        (tmp_path / str(number)).write_text(f"{number % 4},{number % 4 + 4}\n")
    for name in PLACED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(proc.cores, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: placed.append((thread, cores)))
    spread([11, 12, 13, 14], 0, 1)
    assert placed == [(11, {0, 4}), (12, {1, 5}), (13, {2, 6}), (14, {3, 7})]
    placed.clear()
    spread([21, 22], 1, 2)
    assert placed == [(21, {2, 6}), (22, {3, 7})]
    placed.clear()
    spread([31, 32, 33, 34], 1, 2)
    assert placed == [(31, {4}), (32, {5}), (33, {6}), (34, {7})]
    placed.clear()
    (tmp_path / "0").write_text("0-1\n")
    (tmp_path / "1").unlink()  # a sandbox without /sys
    assert proc.cores._siblings(0) == {0, 1}
    assert proc.cores._siblings(1) == {1}
    spread([41, 42, 43], 0, 1)  # fewer than there are cores: the system's business
    assert placed == []
