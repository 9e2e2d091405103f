"""Which replica gets a request: the one that knows the longest beginning of its prompt, then the least loaded.

A bounded memory of prompt beginnings, in blocks of 64 tokens chained by hash. Knows nothing of what the replica's own
cache has kept since, so it is a guess that costs nothing when wrong.
"""

from __future__ import annotations

from collections import OrderedDict

BLOCK = 64
REMEMBERED = 65_536  # blocks


class Routing:
    def __init__(self, replicas: int) -> None:
        self.live = [0] * replicas  # requests under way
        self._seen: OrderedDict[int, int] = OrderedDict()  # chained hash of a beginning → replica

    def choose(self, ids: list[int]) -> int:
        """The replica for a prompt; counts it as live there until `ended`."""
        beginnings = self._beginnings(ids)
        known = next((self._seen[one] for one in reversed(beginnings) if one in self._seen), None)
        least = min(range(len(self.live)), key=self.live.__getitem__)
        # a known prefix is worth a queue somewhat longer than the shortest, not any queue
        chosen = known if known is not None and self.live[known] <= 2 * self.live[least] + 8 else least
        for one in beginnings:
            self._seen[one] = chosen
            self._seen.move_to_end(one)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self.live[chosen] += 1
        return chosen

    def ended(self, replica: int) -> None:
        self.live[replica] -= 1

    def _beginnings(self, ids: list[int]) -> list[int]:
        if len(self.live) == 1:
            return []
        found: list[int] = []
        chain = 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            chain = hash((chain, *ids[start : start + BLOCK]))
            found.append(chain)
        return found
