"""The worker: takes plans in order, runs them on its device, reports each step done. Decides nothing."""

from __future__ import annotations

import ctypes
import signal
import sys

import msgspec

from ipc.sockets import Receiver, Sender
from ipc.token_table import Shape, TokenTable
from runtime.batch import SlotTables
from runtime.device.base import Device
from runtime.device.sim import SimDevice
from runtime.scheduler import Limits
from runtime.step import StepPlan, StepResult


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker process is started with, as JSON in its first argument."""

    limits: Limits
    table: Shape
    table_fd: int
    plans: str  # address the worker binds
    results: str  # address it connects to


class Worker:
    """One device fed from one queue of plans."""

    def __init__(self, device: Device, plans: Receiver[StepPlan], results: Sender[StepResult]) -> None:
        self.device, self.plans, self.results = device, plans, results

    def turn(self, timeout: float) -> bool:
        """Run the next plan; False when none has come within `timeout` seconds."""
        plan = self.plans.receive(timeout)
        if plan is None:
            return False
        self.device.launch(plan, self.results.send)
        return True


def simulated(spec: WorkerSpec) -> Worker:
    """A worker with the simulated device, its sockets open."""
    limits = spec.limits
    tables = SlotTables(limits.slots, -(-limits.max_model_len // limits.block_size), limits.block_size)
    device = SimDevice(tables, TokenTable(spec.table, spec.table_fd), limits.num_blocks)
    return Worker(device, Receiver(spec.plans, StepPlan), Sender(spec.results))


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def main() -> None:
    die_with_parent()
    worker = simulated(msgspec.json.decode(sys.argv[1], type=WorkerSpec))
    while True:
        worker.turn(timeout=1.0)


if __name__ == "__main__":
    main()
