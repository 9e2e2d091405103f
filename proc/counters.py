"""What a tokenizer counts of its requests for /metrics; names are vLLM's. Knows no socket."""

from __future__ import annotations

from ipc.histogram import SECONDS, Histogram, histogram
from proc.conversation import Live


class Counters:
    def __init__(self) -> None:
        self.totals: dict[str, float] = {"prompt_tokens_total": 0, "generation_tokens_total": 0}
        self.finished: dict[str, float] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.histograms: dict[str, Histogram] = {
            name: histogram(SECONDS)
            for name in (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
            )
        }
        self._first = self.histograms["time_to_first_token_seconds"].add
        self._between = self.histograms["inter_token_latency_seconds"].add

    def token(self, live: Live, now: int) -> None:
        """Another token of the request has come, at `now` (ns)."""
        if live.latest:
            self._between((now - live.latest) / 1e9)
        else:
            self._first((now - live.arrived) / 1e9)
        live.latest = now

    def ended(self, live: Live, reason: str) -> None:
        """The request has had its last word: stop, length, abort or error."""
        self.finished[reason] += 1
        self.totals["prompt_tokens_total"] += len(live.prompt)
        generated = len(live.ids) - len(live.message.output_ids)
        self.totals["generation_tokens_total"] += generated
        if reason in ("stop", "length") and live.latest:
            self.histograms["e2e_request_latency_seconds"].add((live.latest - live.arrived) / 1e9)
            if generated > 1:
                seconds = (live.latest - live.first) / 1e9 / (generated - 1)
                self.histograms["request_time_per_output_token_seconds"].add(seconds)

    def figures(self) -> dict[str, float]:
        success = {f"request_success_total:{reason}": count for reason, count in self.finished.items()}
        return self.totals | success
