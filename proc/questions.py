"""What clients ask of the schedulers through a tokenizer (status, trace, metrics), answered once all of them have."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ipc.histogram import total
from ipc.internal import Ask, Load, ToScheduler
from ipc.messages import Metrics, MetricsReply, Status, StatusReply, Trace, TraceReply, Track
from ipc.sockets import Sender
from proc.counters import Counters
from proc.silence import Silence

WORST = ("oldest_step_s", "worker_silence_s")  # of the replicas the largest counts; other figures are summed
Reply = StatusReply | TraceReply | MetricsReply


class Questions:
    """Of tokenizer `index`. `facts` stand in every status beside the figures of all replicas."""

    def __init__(
        self, index: int, schedulers: list[Sender[ToScheduler]], facts: dict[str, Any], grammar_silence: Silence
    ) -> None:
        self.index, self.schedulers, self.facts, self.grammar_silence = index, schedulers, facts, grammar_silence
        self._open: dict[int, tuple[bytes, Status | Trace | Metrics, list[Load]]] = {}
        self._next = 0

    def ask(self, client: bytes, message: Status | Trace | Metrics) -> None:
        self._next += 1
        self._open[self._next] = (client, message, [])
        for scheduler in self.schedulers:
            scheduler.send(Ask(self.index, self._next, message.last if isinstance(message, Trace) else 0))

    def take(self, load: Load, steps: Track, counters: Counters) -> tuple[bytes, Reply] | None:
        """A scheduler's answer; the client and its reply when it is the last one.

        `steps` and `counters` are this tokenizer's part of a trace and of the metrics.
        """
        client, asked, loads = self._open[load.ask]
        loads.append(load)
        if len(loads) < len(self.schedulers):
            return None
        del self._open[load.ask]
        if isinstance(asked, Trace):
            tracks = [Track(f"scheduler{one.scheduler}", one.columns, one.rows) for one in loads]
            steps = msgspec.structs.replace(steps, rows=steps.rows[-asked.last :])
            return client, TraceReply(asked.id, [*tracks, steps])
        figures = {
            name: (max if name in WORST else sum)(one.figures[name] for one in loads) for name in loads[0].figures
        }
        if isinstance(asked, Status):
            figures["grammar_silence_s"] = self.grammar_silence.longest(time.monotonic())
            return client, StatusReply(asked.id, figures | {"replicas": len(loads)} | self.facts)
        histograms = total([one.histograms for one in loads]) | counters.histograms
        return client, MetricsReply(asked.id, figures | counters.figures(), histograms)
