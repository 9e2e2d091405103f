"""The simulated device that takes time: steps queue up in absolute time, as on a GPU, and end when the roofline says.

`launch` does the host's work and queues the step. A step that is launched before the one before it has ended starts at
that end; one that comes later leaves the device idle until then, to the nanosecond. A second thread computes the ids
while the step runs, sleeps until its end and reports it. Masks that come after the forward pass would have been over
lengthen the step. Every figure from it is *simulated*.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.batch import Batch
from runtime.device.base import Masks
from runtime.device.roofline import Roofline
from runtime.device.sim import HashModel
from runtime.step import StepPlan, StepResult

Done = Callable[[StepResult], None]
PR_SET_TIMERSLACK = 29
SAMPLE_NS = 50_000  # from the masks' arrival to a step's end, at least: assumed
SPIN_NS = 50_000  # at most; the rest of a wait is slept
LEARN = 0.05  # weight of the newest wake-up in the mean overshoot


class Alarm:
    """Sleeps to a point in time without using a core; learns by how much sleeping overshoots. For one thread."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of the calling thread, in nanoseconds
        self.overshoot = 50_000.0  # ns, mean

    def sleep_until(self, when: int) -> None:
        """`when`: CLOCK_MONOTONIC nanoseconds."""
        target = when - int(self.overshoot) - SPIN_NS // 2
        now = time.monotonic_ns()
        if target > now:
            time.sleep((target - now) / 1e9)
            now = time.monotonic_ns()
            self.overshoot += LEARN * (min(now - target, 1_000_000) - self.overshoot)
        if when - now > SPIN_NS:  # woken early: never spin longer than that
            time.sleep((when - now - SPIN_NS) / 1e9)
        while time.monotonic_ns() < when:
            pass


@dataclass(frozen=True)
class Queued:
    """A launched step; times in nanoseconds."""

    plan: StepPlan
    batch: Batch
    received: int
    launched: int
    cost: int  # of the device's time
    done: Done


class TimedSimDevice:
    """`model` on an accelerator described by `roofline`; `work` is what one launch costs the host."""

    def __init__(self, model: HashModel, masks: Masks, roofline: Roofline, work: Callable[[], None]) -> None:
        self.model, self.masks, self.roofline, self.work = model, masks, roofline, work
        self.failed: Exception | None = None
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._complete, name="sim-device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan, done: Done) -> None:
        received = time.monotonic_ns()
        batch = self.model.prepare(plan)
        self.work()
        cost = self.roofline.step_ns(len(batch.input_ids), int(batch.seq_lens.sum()))
        self._queue.put(Queued(plan, batch, received, time.monotonic_ns(), cost, done))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _complete(self) -> None:
        alarm, free_at = Alarm(), 0
        try:
            while (step := self._queue.get()) is not None:
                free_at = self._run(step, max(step.launched, free_at), alarm)
        except Exception as error:
            self.failed = error

    def _run(self, step: Queued, started: int, alarm: Alarm) -> int:
        """One step to its end, which is returned. The ids are there early, but nobody is told before the end."""
        last = self.model.forward(step.batch)
        masks = self.masks.wait(step.plan.step) if step.batch.masked else None
        logprobs = self.model.sample(step.batch, last, masks)
        ended = max(started + step.cost, masks.arrived + SAMPLE_NS if masks else 0)
        alarm.sleep_until(ended)
        times = (step.received, step.launched, started, ended, time.monotonic_ns())
        masking, exposed = (masks.written - masks.ordered, ended - started - step.cost) if masks else (0, 0)
        step.done(StepResult(step.plan.epoch, step.plan.step, *times, logprobs, masking, exposed))
        return ended
