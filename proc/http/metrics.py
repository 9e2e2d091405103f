"""The server's figures as Prometheus' text. Names are vLLM's under our prefix, where vLLM has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ipc.messages import MetricsReply

PREFIX = "sidestep:"
GAUGES = {  # figure → (name, words)
    "running": ("num_requests_running", "requests with a slot"),
    "waiting": ("num_requests_waiting", "requests in the queue"),
}
COUNTERS = {
    "preemptions": ("num_preemptions", "requests preempted for lack of pages"),
    "prompt_tokens_total": ("prompt_tokens", "prompt tokens of ended requests"),
    "generation_tokens_total": ("generation_tokens", "output tokens of ended requests"),
    "prefix_cache_queries": ("prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "prompt tokens found there"),
    "overshoot_rows": ("overshoot_rows", "rows computed for requests that had ended"),
    "device_busy_s": ("device_busy_seconds", "time in which the devices computed"),
    "device_idle_with_work_s": (
        "device_idle_seconds",
        "time in which the devices computed nothing though there was work",
    ),
}


class _Reply(Collector):
    def __init__(self, reply: MetricsReply, model: str) -> None:
        self.reply, self.model = reply, model

    def collect(self) -> Iterator[Metric]:
        figures, labels = self.reply.figures, ["model_name"]
        for source, (name, words) in GAUGES.items():
            yield self._one(GaugeMetricFamily(PREFIX + name, words, labels=labels), figures[source])
        share = 1 - figures["available_blocks"] / max(figures["num_blocks"], 1)
        usage = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "share of the KV pages held, 0 to 1", labels=labels)
        yield self._one(usage, share)
        for source, (name, words) in COUNTERS.items():
            yield self._one(CounterMetricFamily(PREFIX + name, words, labels=labels), figures[source])
        yield self._finished()
        for name, one in self.reply.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, name.replace("_", " "), labels=labels)
            sums = [sum(one.counts[: n + 1]) for n in range(len(one.counts))]
            edges = [*map(str, one.bounds), "+Inf"]
            family.add_metric([self.model], list(zip(edges, sums, strict=True)), one.sum)
            yield family

    def _one(self, family: Any, value: float) -> Metric:
        family.add_metric([self.model], value)
        return family  # type: ignore[no-any-return]

    def _finished(self) -> Metric:
        words = "requests that had their last word"
        family = CounterMetricFamily(PREFIX + "request_success", words, labels=["model_name", "finished_reason"])
        for name, value in self.reply.figures.items():
            if name.startswith("request_success_total:"):
                family.add_metric([self.model, name.partition(":")[2]], value)
        return family


def text_of(reply: MetricsReply, model: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reply(reply, model))
    return generate_latest(registry)
