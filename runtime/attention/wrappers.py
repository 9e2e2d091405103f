"""A backend's wrappers: the memory they plan in, and what they are told of a model and of a step's pages.

The host writes what the device reads of a plan into page-locked memory that is the plan's alone until its copy has run
(`GuardedRing`). On the device a plan may overwrite the last one's, since the stream keeps their order; so all decode
wrappers share one workspace, and decode and prefill, planned before either runs, have one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runtime.attention.backend import Backend
from runtime.attention.guarded_ring import GuardedRing
from runtime.attention.page_lists import I32, PageLists
from runtime.device.accelerator import Accelerator
from runtime.model.config import ModelConfig

Tensor = torch.Tensor
CUDA_CORE_GROUP = 4  # query heads of a KV head up to which flashinfer's decode needs no tensor cores to keep up
PINNED = "_pin_memory_int_workspace_buffer"  # flashinfer's name for the memory that a plan is written to


@dataclass(frozen=True)
class Sizes:
    """What has to be held at most."""

    rows: int  # of a step
    pages: int  # of a row
    steps: int  # planned and not known to be done, the one being planned among them


class Wrappers:
    """For queries of `dtype` over KV of `kv_dtype`; `config` counts the heads of one rank."""

    def __init__(
        self,
        config: ModelConfig,
        gpu: Accelerator,
        backend: Backend,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        page_size: int,
        sizes: Sizes,
    ) -> None:
        self.backend, self.kv_dtype, self.head_dim = backend, kv_dtype, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        arrays = 4 * 4 * (sizes.rows + 1)  # bytes: four of int32 beside the workspace
        self.ring = GuardedRing(
            [gpu.pinned(backend.int_workspace + arrays) for _ in range(2 * sizes.steps)],  # two plans a step
            gpu.event,
        )
        floats = backend.float_workspace(config, sizes.rows)
        self.floats = torch.zeros(floats, dtype=torch.uint8, device=gpu.device)
        self.ints = torch.zeros((2, backend.int_workspace), dtype=torch.uint8, device=gpu.device)
        window = config.sliding_window
        self.told: dict[str, Any] = {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "page_size": page_size,
            "window_left": -1 if window is None else window - 1,
            "sm_scale": config.head_dim**-0.5,
            "q_data_type": dtype,
            "kv_data_type": kv_dtype,
            "o_data_type": dtype,
            "non_blocking": True,
        }

    def decode(self, **static: Any) -> Any:
        """A new wrapper; `static` are the arguments that make it one of a CUDA graph."""
        tensor_cores = self.group > CUDA_CORE_GROUP or self.kv_dtype.itemsize == 1
        made = self.backend.decode(
            float_workspace_buffer=self.floats, kv_layout="NHD", use_tensor_cores=tensor_cores, backend="fa2", **static
        )
        return self._ready(made, self.ints[0])

    def prefill(self) -> Any:
        """A new wrapper; on Hopper it takes FlashAttention 3."""
        made = self.backend.prefill(float_workspace_buffer=self.floats, kv_layout="NHD", backend="auto")
        return self._ready(made, self.ints[1])

    def plan_decode(self, wrapper: Any, lists: PageLists, indices: Tensor) -> None:
        """`indices`: int32[n], `lists.kv_indices` on the device."""
        with self.ring.take() as block:
            indptr, last, lengths = self._staged(wrapper, block, lists.kv_indptr, lists.last_page_len, lists.seq_lens)
            wrapper.plan(
                indptr=indptr,
                indices=indices,
                last_page_len=last,
                seq_lens=lengths,
                head_dim=self.head_dim,
                **self.told,
            )

    def plan_prefill(self, wrapper: Any, lists: PageLists, indices: Tensor) -> None:
        """As `plan_decode`."""
        arrays = lists.qo_indptr, lists.kv_indptr, lists.last_page_len, lists.seq_lens
        with self.ring.take() as block:
            queries, indptr, last, lengths = self._staged(wrapper, block, *arrays)
            wrapper.plan(
                qo_indptr=queries,
                paged_kv_indptr=indptr,
                paged_kv_indices=indices,
                paged_kv_last_page_len=last,
                seq_lens=lengths,
                head_dim_qk=self.head_dim,
                causal=True,
                max_token_per_sequence=int((lists.qo_indptr[1:] - lists.qo_indptr[:-1]).max()),
                **self.told,
            )

    def _ready(self, wrapper: Any, ints: Tensor) -> Any:
        if self.backend.fused:
            if not hasattr(wrapper, PINNED):
                raise RuntimeError(f"this flashinfer has no {PINNED}, which plans would share: install 0.6.13")
            wrapper.reset_workspace_buffer(float_workspace_buffer=self.floats, int_workspace_buffer=ints)
        return wrapper

    def _staged(self, wrapper: Any, block: Tensor, *arrays: I32) -> list[Tensor]:
        """The arrays in page-locked memory; the wrapper will plan into the rest of it."""
        at = self.backend.int_workspace
        if self.backend.fused:
            setattr(wrapper, PINNED, block[:at])
        staged = []
        for array in arrays:
            room = block[at : at + array.nbytes].view(torch.int32)
            room.numpy()[:] = array
            staged.append(room)
            at += array.nbytes
        return staged


def workspace_bytes(config: ModelConfig, backend: Backend, sizes: Sizes) -> int:
    """What a `PagedAttention` takes of the device beside the KV cache."""
    lists = 4 * (sizes.rows * sizes.pages + 2 * sizes.rows + 1) + 8 * sizes.rows
    return backend.float_workspace(config, sizes.rows) + 2 * backend.int_workspace + lists
