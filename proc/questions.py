"""What clients ask of the schedulers through a tokenizer: a status or a trace, answered once every scheduler has."""

from __future__ import annotations

from typing import Any

from ipc.messages import Ask, Load, Status, StatusReply, ToScheduler, Trace, TraceReply, Track
from ipc.sockets import Sender


class Questions:
    """Of tokenizer `index`. `facts` stand in every status beside the figures, which are summed over the replicas."""

    def __init__(self, index: int, schedulers: list[Sender[ToScheduler]], facts: dict[str, Any]) -> None:
        self.index, self.schedulers, self.facts = index, schedulers, facts
        self._open: dict[int, tuple[bytes, Status | Trace, list[Load]]] = {}
        self._next = 0

    def ask(self, client: bytes, message: Status | Trace) -> None:
        self._next += 1
        self._open[self._next] = (client, message, [])
        for scheduler in self.schedulers:
            scheduler.send(Ask(self.index, self._next, isinstance(message, Trace)))

    def take(self, load: Load, own: Track) -> tuple[bytes, StatusReply | TraceReply] | None:
        """A scheduler's answer; the client and its reply when it is the last one. `own` is this tokenizer's track."""
        client, asked, loads = self._open[load.ask]
        loads.append(load)
        if len(loads) < len(self.schedulers):
            return None
        del self._open[load.ask]
        if isinstance(asked, Trace):
            tracks = [Track(f"scheduler{one.scheduler}", one.columns, one.rows) for one in loads]
            return client, TraceReply(asked.id, [*tracks, own])
        names = loads[0].figures
        total = {name: sum(one.figures[name] for one in loads) for name in names}
        return client, StatusReply(asked.id, total | {"replicas": len(loads)} | self.facts)
