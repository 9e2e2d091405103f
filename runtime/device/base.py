"""What the worker asks of a device. Members: `cpu` (torch and our kernels), `sim` (modelled, no torch), `cuda`.

A device runs steps in the order in which they were launched. On the CPU `launch` computes and reports before it
returns; an asynchronous device queues the step and reports from its completion thread. The worker's loop is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.step import StepPlan, StepResult


class Tokens(Protocol):
    """The worker's view of the TokenTable (`ipc.token_table.TokenTable` is one)."""

    next: NDArray[np.int32]  # [slots]: the input id of each slot's next decode row

    def poison(self, step: int, rows: NDArray[np.int32]) -> None:
        """Mark the ids of the step's sampling `rows` as not yet written, and stamp the ring entry with `step`."""

    def publish(self, step: int, rows: NDArray[np.int32], slots: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Write `ids` (int32[S, k], k tokens a row) to the ring for `rows` and the last of each to `next[slots]`."""


@dataclass(frozen=True)
class MaskSet:
    """Which ids the constrained rows of a step may draw."""

    rows: NDArray[np.int64]  # [C] among the step's sampling rows
    bits: NDArray[np.uint32]  # [C, words]: bit i % 32 of word i // 32 is set where id i may be drawn
    ordered: int  # CLOCK_MONOTONIC nanoseconds: when the ids before the step were known
    written: int  # when the masks were there
    arrived: int  # when the worker knew


class Masks(Protocol):
    """The second halves of plans that are `masked`."""

    def wait(self, step: int) -> MaskSet:
        """Those of a step; called once for each, in order, by the thread that samples. Raises `TimeoutError`."""


class DeviceInfo(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a device found out while it loaded; the worker's first message."""

    num_blocks: int  # KV pages, the scratch page 0 included
    max_model_len: int  # what the model and the pages allow
    vocab_size: int
    weight_bytes: int
    kv_bytes: int
    shares_prefixes: bool  # a prefix has the same KV in every request
    description: str  # one line for the start-up log and /status
    exports_table: bool = False  # the ids stand in the device's memory: where, the worker's next message says


class Device(Protocol):
    """One accelerator with its weights and KV pages. `failed`: what has ended a thread of its own."""

    failed: Exception | None

    def launch(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        """Run the plan after all launched before it; call `done` once its ids are visible in the TokenTable."""

    def close(self) -> None:
        """Give everything back; steps still queued are dropped."""
