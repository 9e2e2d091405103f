"""How long the replicas' grammar processes have said nothing, as a tokenizer hears them. Knows no socket.

Each says a word a second, whatever else it does. One that is stopped neither dies, which the supervisor would notice,
nor answers; whoever waits for it must not wait with it.
"""

from __future__ import annotations

LONGEST = 10.0  # seconds; loading llguidance and the masks of a large step are far below


class Silence:
    """Of `replicas` grammar processes; `now` in monotonic seconds."""

    def __init__(self, replicas: int, now: float) -> None:
        self._heard = [now] * replicas

    def lives(self, replica: int, now: float) -> None:
        if replica < len(self._heard):
            self._heard[replica] = now

    def longest(self, now: float) -> float:
        return now - min(self._heard)

    def lost(self, now: float) -> list[int]:
        """Replicas whose grammar process has said nothing for too long."""
        return [replica for replica, heard in enumerate(self._heard) if now - heard > LONGEST]
