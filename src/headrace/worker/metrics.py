"""A worker's metrics for Prometheus: ``headrace_worker_*``, and the ``vllm:*`` names that existing dashboards query.

Under vLLM's names stands only what gateways do not tell already (see :mod:`headrace.gateway.metrics`).
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.core.frames import EngineStats, StepFrame
from headrace.core.requests import FinishReason

_PREFIXES = ("headrace_worker_", "vllm:")
_LABEL = "model_name"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_DURATIONS = {
    "request_queue_time_seconds": "From submit to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "time_to_first_token_seconds": "From submit to the first token.",
    "e2e_request_latency_seconds": "From submit to the last token.",
}
_TOLD_BY_GATEWAYS = {"time_to_first_token_seconds", "e2e_request_latency_seconds"}
"""Gateways tell these under vLLM's names, from the client's side: a sum over both would count each request twice."""


class WorkerMetrics(Collector):
    """Counters come from the engine's statistics at the time of a scrape; durations from the frames that pass by."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._stats: EngineStats | None = None
        self._healthy = True
        self.num_connections = 0
        self.num_refused = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._durations = {
            name: [
                Histogram(prefix + name, help_text, [_LABEL], buckets=_SECONDS, registry=self._registry).labels(model)
                for prefix in (_PREFIXES[:1] if name in _TOLD_BY_GATEWAYS else _PREFIXES)
            ]
            for name, help_text in _DURATIONS.items()
        }

    def observe(self, frame: StepFrame) -> None:
        """Take the durations of the sequences that ended in a step."""
        for delta in frame.deltas:
            timing = delta.timing
            if timing is None or delta.finish not in (FinishReason.STOP, FinishReason.LENGTH):
                continue
            first_token_s = timing.wait_s + timing.prefill_s
            self._observe("request_queue_time_seconds", timing.wait_s)
            self._observe("request_prefill_time_seconds", timing.prefill_s)
            self._observe("request_decode_time_seconds", timing.decode_s)
            self._observe("time_to_first_token_seconds", first_token_s)
            self._observe("e2e_request_latency_seconds", first_token_s + timing.decode_s)

    def exposition(self, stats: EngineStats | None, *, healthy: bool) -> bytes:
        """The text for a scrape; without fresh statistics the last ones are repeated."""
        self._stats = stats or self._stats
        self._healthy = healthy
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        yield self._gauge("headrace_worker_healthy", "0 while the engine is stuck.", float(self._healthy))
        yield self._gauge("headrace_worker_connections", "Clients connected.", self.num_connections)
        yield self._counter("headrace_worker_refused", "Sequences that were not taken.", self.num_refused)
        if self._stats is None:
            return
        yield self._gauge("headrace_worker_draining", "1 while nothing new is taken.", float(self._stats.draining))
        yield self._gauge("headrace_worker_credit", "Sequences that would be accepted now.", self._stats.load.credit)
        yield self._gauge("headrace_worker_step", "Steps of the engine so far.", self._stats.step)
        yield self._gauge(
            "headrace_worker_last_progress_age_seconds",
            "Since a step finished, or nothing was to do.",
            self._stats.last_progress_age_s,
        )
        memory = GaugeMetricFamily(
            "headrace_worker_memory_bytes", "Memory by use, planned and measured.", labels=[_LABEL, "use"]
        )
        for use, num_bytes in self._stats.memory.items():
            memory.add_metric([self._model, use], num_bytes)
        yield memory
        for prefix in _PREFIXES:
            yield from self._shared(prefix, self._stats)

    def _shared(self, prefix: str, stats: EngineStats) -> Iterable[Metric]:
        """What exists under both names."""
        load = stats.load
        used = stats.blocks_in_use / load.num_blocks if load.num_blocks else 0.0
        yield self._gauge(prefix + "num_requests_running", "Sequences in the batch.", load.num_running)
        yield self._gauge(prefix + "num_requests_waiting", "Sequences that wait for a slot.", load.num_waiting)
        yield self._gauge(prefix + "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.num_cached_prompt_tokens),
            "prompt_tokens": ("Prompt tokens processed.", stats.num_prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.num_generated_tokens),
            "num_preemptions": ("Sequences put back to make room.", stats.num_preemptions),
        }
        for name, (help_text, value) in counters.items():
            yield self._counter(prefix + name, help_text, value)
        finished = CounterMetricFamily(
            prefix + "request_success", "Sequences that ended, by reason.", labels=[_LABEL, "finished_reason"]
        )
        for reason in FinishReason:
            finished.add_metric([self._model, reason.value], stats.num_finished.get(reason.value, 0))
        yield finished

    def _observe(self, name: str, seconds: float) -> None:
        for histogram in self._durations[name]:
            histogram.observe(seconds)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=[_LABEL])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=[_LABEL])
        family.add_metric([self._model], value)
        return family
