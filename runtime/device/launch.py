"""The host's work for launching one step, as a simulated device pays it: real work, of a length set at the start.

A worker that launches kernels from Python runs many short calls which drop and take the interpreter lock; `torch` does
that with real dispatches of tiny operations. `python` is bytecode that keeps the lock, the other extreme. The amount
of work is fixed when the device is built, on an otherwise idle interpreter, so that it takes longer where others want
the lock, as it does in a real worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

KINDS = ("torch", "python")
PROBE = 2000  # calls in one measurement
PROBES = 9


def launch_work(kind: str, milliseconds: float) -> Callable[[], None]:
    """A call that takes `milliseconds` when nothing else runs."""
    if not milliseconds:
        return lambda: None
    work = _torch_work() if kind == "torch" else _python_work
    work(PROBE)
    count = max(1, round(milliseconds / 1000 / min(_seconds(work) for _ in range(PROBES)) * PROBE))
    return lambda: work(count)


def _seconds(work: Callable[[int], None]) -> float:
    began = time.perf_counter()
    work(PROBE)
    return time.perf_counter() - began


def _torch_work() -> Callable[[int], None]:
    import torch

    torch.set_num_threads(1)
    one, other = torch.ones(1), torch.ones(1)
    add = torch.add

    def work(count: int) -> None:
        with torch.inference_mode():
            for _ in range(count):
                add(one, other, out=other)

    return work


def _python_work(count: int) -> None:
    total = 0
    for number in range(count):
        total += number & 3
