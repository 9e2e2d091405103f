"""When a device did what, by the host's clock: from events, which only tell how long after one another they were."""

from __future__ import annotations

from runtime.device.accelerator import Event

SPAN_NS = 1_000_000_000  # after which the clocks are compared anew; events count in float32 milliseconds
WAKING_NS = 20_000  # from an event to who sleeps for it, at least: assumed


class DeviceTimes:
    """CLOCK_MONOTONIC nanoseconds. `anchor` has just been waited for, at `now`."""

    def __init__(self, anchor: Event, now: int) -> None:
        self.anchor, self.at = anchor, now - WAKING_NS
        self.last = self.at
        self.least = SPAN_NS  # ns from the end of a step, as reckoned, to the host's waking

    def step(self, started: Event, ended: Event, now: int) -> tuple[int, int]:
        """(start, end) of a step whose end the host has woken for at `now`; neither overlaps the step before."""
        end = self._of(ended)
        if end > now:  # the host's clock has been slower
            self.at -= end - now
            end = now
        self.least = min(self.least, now - end)
        start = min(max(self._of(started), self.last), end)
        if end - self.at > SPAN_NS:
            self.anchor, self.at = ended, end + max(0, self.least - WAKING_NS)
            self.least = SPAN_NS
        self.last = max(end, self.last)
        return start, self.last

    def _of(self, event: Event) -> int:
        return self.at + round(self.anchor.elapsed_ms(event) * 1e6)
