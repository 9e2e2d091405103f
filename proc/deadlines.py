"""When requests must have ended, by a clock in seconds. Knows no request but its number."""

from __future__ import annotations

import heapq


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def set(self, number: int, when: float) -> None:
        heapq.heappush(self._heap, (when, number))

    def due(self, now: float) -> list[int]:
        """The numbers whose time has come; each once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[1])
        return found

    def wait(self, now: float, longest: float) -> float:
        """Seconds until the next one, at most `longest`."""
        return min(max(self._heap[0][0] - now, 0.0), longest) if self._heap else longest
