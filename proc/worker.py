"""The worker: takes plans in order, runs them on its device, reports each step done. Decides nothing.

The ranks of a replica each take every plan and draw the same tokens from the same logits. Each reads its next inputs
from a TokenTable of its own; the scheduler's is that of rank 0, which alone reports.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from ipc.endpoints import address
from ipc.internal import Alive, TableExport
from ipc.sockets import Receiver, Sender
from ipc.token_table import TokenTable
from proc.devices import build
from proc.halves import Halves, Stopped
from proc.role import Command, Poller, ProcessSpec
from proc.shapes import table_shape
from runtime.device.base import Device, DeviceInfo
from runtime.model.sharding import Rank
from runtime.step import StepPlan, StepResult

Report = DeviceInfo | TableExport | StepResult | Alive


class Worker:
    """One device fed from one queue of plans."""

    finished = False

    def __init__(self, spec: ProcessSpec, index: int) -> None:
        self.spec, self.index = spec, index
        self.replica, rank = divmod(index, spec.num_ranks)
        self.rank = Rank(rank, spec.num_ranks)
        self.table = TokenTable(table_shape(spec.settings), None if rank else spec.tables[self.replica])
        self.plans: Receiver[StepPlan] = Receiver(address(spec.run_dir, "worker", index, "plans"), StepPlan)
        self.results: Sender[Report] = Sender(address(spec.run_dir, "scheduler", self.replica, "results"))
        self.telling = threading.Lock()  # a device reports from a thread of its own
        self.halves = Halves(spec, self.replica, index)
        self.device: Device | None = None

    @property
    def sockets(self) -> list[Any]:
        return [self.plans.socket]

    def start(self) -> dict[str, Any]:
        """Load the model and tell the scheduler what there is to work with."""
        spec, meeting = self.spec, f"{self.spec.run_dir}/ranks{self.replica}"
        built = build(spec, self.table, self.halves, self.rank, self.index, meeting)
        self.device, info = built.device, built.info
        self.halves.given_up = lambda: built.device.failed is not None
        self._report(info)
        if built.export is not None:
            self._report(built.export)
        return {
            "device": info.description,
            "weight_bytes": info.weight_bytes,
            "kv_bytes": info.kv_bytes,
            "kv_tokens": (info.num_blocks - 1) * self.spec.settings.block_size,
            "max_model_len": info.max_model_len,
        }

    def turn(self, poller: Poller) -> None:
        """Wait for a plan and run all that are there; without one, say that this process lives."""
        assert self.device is not None
        self.halves.control = poller.control
        poller.wait()
        if self.device.failed is not None:
            raise self.device.failed
        plan = self.plans.receive(0)
        if plan is None:
            self._send(Alive(self.rank.index))
        with suppress(Stopped):
            while plan is not None:
                self.device.launch(plan, self._report)
                plan = self.plans.receive(0)

    def _report(self, word: Report) -> None:
        if self.rank.index == 0:
            self._send(word)

    def _send(self, word: Report) -> None:
        with self.telling:
            self.results.send(word)

    def command(self, command: Command) -> None:
        """A worker has nothing to drain: it ends after its scheduler."""

    def close(self) -> None:
        self.halves.close()
        if self.device is not None:
            self.device.close()
        self.halves.inbox.close()
        self.plans.close()
        self.results.close()
