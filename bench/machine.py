"""What the machine gives at most, measured: bytes read per second and multiply-adds per second, with all threads.

Several ways each, and of each the best look of the whole run: what a shared machine takes away only ever adds time, so
a floor from anything but its best moments is one that a kernel can go under. Knows no model.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from dataclasses import dataclass

import torch

from runtime.kernels.library import Kernels
from runtime.kernels.pack import pack

Tensor = torch.Tensor
Run = Callable[[], object]


def seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Work:
    """What cannot be avoided: bytes that come from memory, floating point operations (a multiply-add is two)."""

    bytes: float
    flops: float


class Machine:
    """`size` bytes are read, far more than the caches hold; products are of `side` rows and columns."""

    def __init__(self, kernels: Kernels, size: int, side: int) -> None:
        self.size, self.flops = size, 2 * side**3
        self.reads, self.products = _reads(size), _products(kernels, side)
        self.times: dict[str, list[float]] = {name: [] for name in (*self.reads, *self.products)}

    def look(self, times: int) -> None:
        for _ in range(times):
            for name, run in (*self.reads.items(), *self.products.items()):
                self.times[name].append(seconds(run))

    def rates(self, ways: dict[str, Run], amount: float) -> dict[str, float]:
        """`amount` per second, for each way; of the best look so far."""
        return {name: amount / min(self.times[name]) for name in ways}

    def floor(self, work: Work) -> float:
        """Seconds that the work takes at least, as far as is known by now."""
        return max(self._reading(work), self._multiplying(work))

    def look_again(self, work: Work) -> float:
        """Measure what bounds the work once more; the seconds that took."""
        reads = self._reading(work) > self._multiplying(work)
        ways, amount = (self.reads, self.size) if reads else (self.products, self.flops)
        rates = self.rates(ways, amount)
        name = max(rates, key=lambda way: rates[way])
        self.times[name].append(seconds(ways[name]))
        return self.times[name][-1]

    def _reading(self, work: Work) -> float:
        return work.bytes / max(self.rates(self.reads, self.size).values())

    def _multiplying(self, work: Work) -> float:
        return work.flops / max(self.rates(self.products, self.flops).values())


def room(size: int) -> Tensor:
    """uint8[size], at an address that is a multiple of 64."""
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :]


def _reads(size: int) -> dict[str, Run]:
    """Ways to read it all: torch's sum, each thread a part; numpy's and libc's with threads of our own."""
    memory, threads = _zeros(size), torch.get_num_threads()
    pool, compare = ThreadPoolExecutor(threads), ctypes.CDLL(None).memcmp  # both let go of the interpreter's lock
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    part, at = size // 2 // threads, memory.data_ptr()  # of each half

    def halves_compared() -> None:
        list(pool.map(lambda i: compare(at + i * part, at + size // 2 + i * part, part), range(threads)))

    def numpy_max() -> None:
        list(pool.map(lambda piece: piece.numpy().max(), memory.chunk(threads)))

    return {"torch.sum": memory.sum, "memcmp": halves_compared, "numpy.max": numpy_max}


def _zeros(size: int) -> Tensor:
    """float32, written, in huge pages where the kernel has them, as packed weights are."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(0)


def _products(kernels: Kernels, side: int) -> dict[str, Run]:
    """A square product in torch, and in our packed layers of both types."""
    x, weight, threads = torch.randn(side, side), torch.randn(side, side), torch.get_num_threads()
    out = torch.empty(side, side)

    def packed(dtype: torch.dtype) -> Run:
        layer = pack(weight.to(dtype))
        memory = room(kernels.linear_size(byref(layer.struct), side, threads))

        def run() -> None:
            where = (x.data_ptr(), side, out.data_ptr(), memory.data_ptr())
            kernels.linear(byref(layer.struct), *where, threads)

        return run

    names = {f"packed {str(dtype).removeprefix('torch.')}": dtype for dtype in (torch.float32, torch.bfloat16)}
    return {"torch.mm": lambda: torch.mm(x, weight, out=out)} | {name: packed(dtype) for name, dtype in names.items()}
