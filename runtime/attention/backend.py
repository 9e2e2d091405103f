"""Which wrappers attend on a GPU: flashinfer's, or those of `runtime.attention.gathered` where its kernels are missing.

flashinfer is imported when it is chosen, never with this module.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.attention import gathered
from runtime.model.config import ModelConfig

HEAD_DIMS = (64, 128, 256)  # of flashinfer's kernels for decode and prefill, FA2 and FA3
INT_WORKSPACE = 8 << 20  # bytes, as flashinfer's own
LEAST_FLOAT_WORKSPACE = 128 << 20  # what it recommends
CTAS, PREFILL_TILE = 320, 128  # at most: two for each multiprocessor, and queries (times heads of a group) of one


@dataclass(frozen=True)
class Backend:
    """Two classes with the interface of flashinfer's `BatchDecodeWithPagedKVCacheWrapper` and `BatchPrefillWith...`."""

    name: str
    decode: Callable[..., Any]
    prefill: Callable[..., Any]
    fused: bool  # kernels that take workspaces, and that a CUDA graph may record

    @property
    def int_workspace(self) -> int:
        """Bytes of each plan, on the host and on the device."""
        return INT_WORKSPACE if self.fused else 0

    def float_workspace(self, config: ModelConfig, rows: int) -> int:
        """Bytes for the parts of rows whose keys are split: of a prefill, or of a graph of `rows` decode rows."""
        if not self.fused:
            return 0
        group, most = config.num_heads // config.num_kv_heads, CTAS // config.num_kv_heads
        tile = 16 if group <= 16 else 64  # of decode rows on tensor cores
        decode = tile * max(most, rows + -(-rows * group // tile))  # as many tiles as a graph is given for any lengths
        queries = config.num_heads * max(decode, most * PREFILL_TILE)
        return max(LEAST_FLOAT_WORKSPACE, queries * (config.head_dim + 1) * 4 + 4096)


GATHERED = Backend(
    "gathered", gathered.BatchDecodeWithPagedKVCacheWrapper, gathered.BatchPrefillWithPagedKVCacheWrapper, False
)


def choose(config: ModelConfig) -> tuple[Backend, str]:
    """The fastest there is, and one sentence about it: what is missing, and what would bring it."""
    if config.head_dim not in HEAD_DIMS:
        return GATHERED, _slow(f"flashinfer has no kernels for heads of {config.head_dim}", "")
    try:
        flashinfer: Any = import_module("flashinfer")
    except Exception as error:  # also one of its parts, or two that do not go together
        told = " ".join(str(error).split()) or type(error).__name__
        return GATHERED, _slow(f"flashinfer cannot be imported ({told})", "pip install flashinfer-python==0.6.13")
    prebuilt, compiler = find_spec("flashinfer_jit_cache") is not None, nvcc()
    if not prebuilt and compiler is None:
        remedy = "install the CUDA toolkit, set CUDA_HOME to it, or install flashinfer-jit-cache of the same version"
        return GATHERED, _slow("flashinfer finds neither nvcc nor kernels built before", remedy)
    if not find_ninja() and not prebuilt:
        return GATHERED, _slow("flashinfer finds no ninja to build its kernels", "pip install ninja")
    backend = Backend(
        "flashinfer",
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        True,
    )
    return (
        backend,
        f"attention by flashinfer {flashinfer.__version__}, kernels {compiler or 'from flashinfer-jit-cache'}",
    )


def nvcc() -> Path | None:
    """The compiler that flashinfer would take."""
    named = os.environ.get("FLASHINFER_NVCC")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = named or (f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    found = shutil.which(path)
    return Path(found) if found else None


def find_ninja() -> bool:
    """flashinfer calls it by name. In an environment that is not activated it stands beside the interpreter."""
    folder = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and shutil.which("ninja", path=folder):
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    return shutil.which("ninja") is not None


def _slow(reason: str, remedy: str) -> str:
    told = f"attention gathers pages in torch, slowly and without CUDA graphs: {reason}"
    return f"{told}; {remedy}" if remedy else told
