"""How a replica's device spent its time, and the last steps one by one. Knows no socket and no engine.

*Idle with work*: the device computed nothing while at least one request that still needed a row had been received,
whatever it waited for. The rest of the idle time is *without work*.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice

from runtime.step import StepResult

STEPS = 4096  # remembered one by one
COLUMNS = (
    "step",
    "rows",  # that sampled
    "planned",  # from here on nanoseconds of CLOCK_MONOTONIC: the plan was begun
    "sent",  # handed to the worker
    "received",  # taken up by the worker
    "launched",  # the host's work for it was done
    "started",  # on the device
    "ended",
    "reported",  # by the worker
    "taken",  # up by the scheduler
    "committed",
    "delivered",  # to the tokenizers
    "idle_with_work",  # nanoseconds before `started`, and of waiting for masks
    "running",  # requests, when committed
    "waiting",
    "used_blocks",
)


class DeviceClock:
    """Of a device of `ranks` workers; fed with each step as it is sent, committed and delivered."""

    def __init__(self, ranks: int = 1) -> None:
        now = time.monotonic_ns()  # of the device's readiness
        self.busy = self.idle_with_work = self.idle_without_work = self.num_steps = 0
        self.masking = self.exposed = 0  # ns: making masks, and of that what no forward pass hid
        self.late = 0  # ns from the ends of steps to the worker's word of them
        self.work_since = now  # when there last was work after there had been none
        self.last_ended = now
        self.heard = [now] * ranks  # each worker's last word; a step that is done is a word of all
        self._sent: deque[tuple[int, int]] = deque()  # (planned, sent) of the steps in flight
        self.steps: deque[list[int]] = deque(maxlen=STEPS)  # COLUMNS of each

    def lives(self, rank: int, now: int) -> None:
        """A worker with nothing to do has said a word."""
        if rank < len(self.heard):
            self.heard[rank] = now

    def sent(self, planned: int, sent: int) -> None:
        self._sent.append((planned, sent))

    def committed(
        self, result: StepResult, taken: int, rows: int, running: int, waiting: int, used_blocks: int
    ) -> None:
        """The oldest step in flight is done."""
        gap = max(0, result.started - self.last_ended)
        with_work = max(0, min(gap, result.started - self.work_since)) + result.exposed
        gap += result.exposed
        self.num_steps += 1
        self.busy += result.ended - result.started - result.exposed
        self.masking += result.masking
        self.exposed += result.exposed
        self.idle_with_work += with_work
        self.idle_without_work += gap - with_work
        self.late += result.reported - result.ended
        self.last_ended = result.ended
        self.heard = [taken] * len(self.heard)
        now = time.monotonic_ns()
        times = (result.received, result.launched, result.started, result.ended, result.reported, taken, now, now)
        self.steps.append([result.step, rows, *self._sent.popleft(), *times, with_work, running, waiting, used_blocks])

    def delivered(self) -> None:
        """The tokens of the step committed last have been sent on."""
        self.steps[-1][COLUMNS.index("delivered")] = time.monotonic_ns()

    def last(self, count: int) -> list[list[int]]:
        """The last `count` steps, the oldest first."""
        return list(islice(self.steps, max(0, len(self.steps) - count), None))

    def figures(self, has_work: bool) -> dict[str, float]:
        """Seconds until now; the time since the last step counts by `has_work` unless steps are in flight."""
        now = time.monotonic_ns()
        gap = 0 if self._sent else now - self.last_ended
        with_work = max(0, min(gap, now - self.work_since)) if has_work else 0
        return {
            "device_busy_s": self.busy / 1e9,
            "device_idle_with_work_s": (self.idle_with_work + with_work) / 1e9,
            "device_idle_without_work_s": (self.idle_without_work + gap - with_work) / 1e9,
            "masking_s": self.masking / 1e9,
            "masking_exposed_s": self.exposed / 1e9,
            "steps_committed": self.num_steps,
            "oldest_step_s": (now - self._sent[0][1]) / 1e9 if self._sent else 0.0,  # in flight for so long
            "worker_silence_s": 0.0 if self._sent else (now - min(self.heard)) / 1e9,  # with nothing to do
            "report_delay_s": self.late / 1e9,
        }
