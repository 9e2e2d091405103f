"""The C library of the CPU path, as ctypes sees it: its structures and its kernels. See csrc/kernels.h.

It is built when the package is installed and uses torch's own OpenMP, so that there is one pool of threads. Without it
(no compiler, or torch in the environment variable VARIABLE) the torch path runs, which is the reference.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
VARIABLE = "SIDESTEP_KERNELS"  # an instruction set's name, or torch; for tests and comparisons
LIBRARY = "SIDESTEP_KERNELS_LIBRARY"  # another build of the library; for tests
TILE, PART = 16, 512  # as in csrc/kernels.h
F32, BF16, INT8, INT4 = range(4)


class Linear(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("n", c_int32), ("k", c_int32), ("data", c_void_p), ("bias", c_void_p)]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("keys", "values")),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("block_size", "window", "kv_kind", "embedding_kind")),
        ("eps", c_float),
        ("layer", POINTER(Layer)),
        *((name, c_void_p) for name in ("embedding", "norm")),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("tokens", "rows", "decode", "pages", "parts")),
        *((name, c_void_p) for name in ("ids", "cells", "cos", "sin")),
        *((name, c_void_p) for name in ("query_lens", "seq_lens", "page_table")),
    ]


class Draws(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("rows", "size")),
        *((name, c_void_p) for name in ("logits", "temperature", "top_k", "top_p", "min_p", "uniform", "ids")),
    ]


class Penalty(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("row", "count")),
        *((name, c_void_p) for name in ("ids", "counts")),
        *((name, c_float) for name in ("repetition", "frequency", "presence")),
    ]


class Told(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("rows", "size", "real", "top")),
        ("least", c_float),
        *((name, c_void_p) for name in ("logits", "ids", "values", "ranks")),
    ]


_MODEL, _STEP, _LINEAR = POINTER(Model), POINTER(Step), POINTER(Linear)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "scratch_size": (c_int64, _MODEL, c_int32, c_int32, c_int32, c_int32),
    "forward": (None, _MODEL, _STEP, c_void_p, c_void_p, c_int32),
    "linear_size": (c_int64, _LINEAR, c_int32, c_int32),
    "linear": (None, _LINEAR, c_void_p, c_int32, c_void_p, c_void_p, c_int32),
    "attend": (None, _MODEL, _STEP, c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_int32),
    "rms_norm": (None, c_void_p, c_void_p, c_float, c_int32, c_int32, c_void_p, c_int32),
    "choice_size": (c_int64, c_int32),
    "draw": (None, POINTER(Draws), c_void_p, c_int32),
    "tell": (None, POINTER(Told), c_void_p, c_int32),
    "mask": (None, c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_int32, c_int32),
    "penalise": (None, c_void_p, c_int32, POINTER(Penalty), c_int32, c_int32),
}


class Kernels(ctypes.Structure):
    """One instruction set's; the fields are functions."""

    _fields_ = [("isa", c_char_p), *((name, ctypes.CFUNCTYPE(*types)) for name, types in _FUNCTIONS.items())]

    @property
    def name(self) -> str:
        return str(self.isa.decode())


def kernels() -> Kernels | None:
    """The best that this machine runs, or the one that is named by $SIDESTEP_KERNELS; None for the torch path.

    Raises `ValueError` for a name that does not run here.
    """
    wished = os.environ.get(VARIABLE, "")
    if wished == "torch":
        return None
    found = {one.name: one for one in every()}
    if wished and wished not in found:
        raise ValueError(f"{VARIABLE}={wished}: this machine has {', '.join([*found, 'torch'])}")
    return found[wished] if wished else next(iter(found.values()), None)


def every() -> Iterator[Kernels]:
    """All that this machine runs, the best first."""
    library = _library()
    if library is None:
        return
    index = 0
    while found := library.sidestep_kernels(index):
        yield found.contents
        index += 1


def compute_threads(count: int) -> list[int]:
    """The system's ids of the `count` threads that compute for the first, which asks; without the library none."""
    library = _library()
    if library is None:
        return []
    ids = (c_int32 * count)()
    library.sidestep_threads(ids, count)
    return [one for one in ids if one]


@cache
def _library() -> ctypes.CDLL | None:
    other = os.environ.get(LIBRARY)
    files = [Path(other)] if other else sorted(Path(__file__).parent.glob("_native*.so"))
    if not files:
        return None
    try:
        ctypes.CDLL(_openmp(), ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(files[0]))
    except OSError as error:  # another machine's build, or no OpenMP
        log.warning("the C kernels cannot be loaded: %s", error)
        return None
    library.sidestep_kernels.restype = POINTER(Kernels)
    return library


def _openmp() -> str:
    """The OpenMP that torch has loaded; the system's where torch has none."""
    import torch  # noqa: F401 (loads it)

    with open("/proc/self/maps") as maps:
        return next((line.split()[-1] for line in maps if "/libgomp" in line), "libgomp.so.1")
