"""The queue: which requests may enter it, and which is the first. Knows no slots and no pages."""

from __future__ import annotations

import heapq
from dataclasses import replace

from runtime.limits import Limits
from runtime.request import AdmissionError, Request


class WaitingQueue:
    """Requests without a slot, by (priority, arrival). A preempted one returns to the place it had."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._requests: dict[int, Request] = {}
        self._order: list[tuple[int, int, int]] = []  # heap of (priority, arrival, request id); some are gone
        self._next_arrival = 0

    def __len__(self) -> int:
        return len(self._requests)

    def admit(self, request: Request) -> None:
        """Add a request. Raises `AdmissionError` for one that can never run or that there is no room for."""
        length = len(request.prompt_ids) + len(request.output_ids)
        if request.id in self._requests:
            raise AdmissionError("id", f"request {request.id} is live already")
        if not len(request.prompt_ids):
            raise AdmissionError("prompt", "the prompt is empty")
        if length >= self.limits.max_model_len:
            longest = self.limits.max_model_len - 1
            raise AdmissionError(
                "prompt", f"the prompt has {length} tokens, at most {longest} fit the model", "prompt_too_long"
            )
        if request.max_tokens <= len(request.output_ids):
            raise AdmissionError("max_tokens", "max_tokens leaves nothing to generate")
        queued = self.limits.max_num_queued
        if queued is not None and request.arrival is None and len(self) >= queued:
            raise AdmissionError("queue", f"the queue is full ({queued} requests wait)", "queue_full")
        self.push(request)

    def push(self, request: Request) -> None:
        """Add a request that need not be checked; one without an arrival gets the next."""
        if request.arrival is None:
            request = replace(request, arrival=self._next_arrival)
            self._next_arrival += 1
        assert request.arrival is not None
        self._requests[request.id] = request
        heapq.heappush(self._order, (request.priority, request.arrival, request.id))

    def discard(self, request_id: int) -> bool:
        """Forget a request; False if it does not wait."""
        return self._requests.pop(request_id, None) is not None

    def first(self) -> Request | None:
        """It stays there until `pop`."""
        while self._order:
            _, arrival, request_id = self._order[0]
            request = self._requests.get(request_id)
            if request is not None and request.arrival == arrival:
                return request
            heapq.heappop(self._order)
        return None

    def pop(self) -> None:
        """Take out the one that `first` has just returned."""
        del self._requests[heapq.heappop(self._order)[2]]
