"""What a gateway counts: vLLM's names where dashboards expect them, ``headrace_*`` for the rest.

Under vLLM's names stands only what is measured best from the client's side. Running and waiting sequences, cache use,
queue, prefill and decode times, and token counters are the workers' to tell: a sum over both would count them twice.
Label values are bounded: models that are served, routes, statuses, error codes, and so many tenants.
"""

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.core.ids import TenantId
from headrace.gateway.call import Call
from headrace.gateway.timing import STAGES

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_STAGE_BUCKETS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_OTHER_TENANT = "other"


class TokenGaps(Collector):
    """A histogram of the time between tokens, observed once for each token: an increment, without locks.

    Only the event loop's thread observes.
    """

    def __init__(self, name: str, help_text: str) -> None:
        self._name = name
        self._help = help_text
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, model: str, gap_s: float, num_tokens: int) -> None:
        """Count ``num_tokens`` tokens that came ``gap_s`` after the ones before, together."""
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = [0] * (len(_TOKEN_BUCKETS) + 1)
            self._sums[model] = 0.0
        counts[bisect_left(_TOKEN_BUCKETS, gap_s / num_tokens)] += num_tokens
        self._sums[model] += gap_s

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        for model, counts in list(self._counts.items()):
            buckets: list[tuple[str, float]] = []
            total = 0
            for bound, count in zip((*_TOKEN_BUCKETS, float("inf")), counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
            family.add_metric([model], buckets, self._sums[model])
        yield family


class GatewayMetrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self, max_tenant_labels: int) -> None:
        self.registry = CollectorRegistry()
        self._max_tenants = max_tenant_labels
        self._tenants: set[TenantId] = set()
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From request to first token.", _TTFT_BUCKETS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From request to last byte.", _E2E_BUCKETS)
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt tokens.", _COUNT_BUCKETS)
        self._output_tokens = self._histogram("vllm:request_generation_tokens", "Output tokens.", _COUNT_BUCKETS)
        self.token_gaps = TokenGaps("vllm:inter_token_latency_seconds", "Time between output tokens of a choice.")
        self.registry.register(self.token_gaps)
        self._choices = self._counter("headrace_choices", "Choices that ended.", ["model_name", "finish_reason"])
        self._requests = self._counter(
            "headrace_requests", "Answers by route and status.", ["route", "method", "status"]
        )
        self._errors = self._counter("headrace_errors", "Errors by code.", ["route", "code"])
        self._tenant_requests = self._counter("headrace_tenant_requests", "Authenticated requests.", ["tenant"])
        self._tenant_tokens = self._counter("headrace_tenant_tokens", "Tokens by direction.", ["tenant", "direction"])
        self._stage = Histogram(
            "headrace_request_stage_seconds",
            "Where the time of generations went.",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )
        self._stages = {stage: self._stage.labels(stage) for stage in STAGES}
        self.in_flight = Gauge("headrace_requests_in_flight", "Generations in this gateway.", registry=self.registry)
        self.draining = Gauge("headrace_gateway_draining", "1 while shutting down.", registry=self.registry)

    def finished(self, call: Call, route: str) -> None:
        """Count a request that has ended. ``route`` is a path of the route table, or ``unknown``."""
        status = str(call.outcome)
        method = call.scope["method"] if call.scope["method"] in ("GET", "HEAD", "POST") else "other"
        self._requests.labels(route, method, status).inc()
        if call.error is not None:
            self._errors.labels(route, call.error.code).inc()
        tenant = _OTHER_TENANT
        if call.key is not None:
            tenant = self._tenant_label(call.key.tenant_id)
            self._tenant_requests.labels(tenant).inc()
        if call.model is None:
            return
        self._finished_generation(call, call.model, tenant)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _finished_generation(self, call: Call, model: str, tenant: str) -> None:
        for stage, histogram in self._stages.items():
            histogram.observe(getattr(call.breakdown, stage))
        if call.first_token_at is None:
            return
        self._ttft.labels(model).observe(call.first_token_at - call.started_at)
        self._e2e.labels(model).observe(call.clock.monotonic() - call.started_at)
        self._prompt_tokens.labels(model).observe(call.usage.num_prompt)
        self._output_tokens.labels(model).observe(call.usage.num_output)
        self._tenant_tokens.labels(tenant, "input").inc(call.usage.num_prompt)
        self._tenant_tokens.labels(tenant, "output").inc(call.usage.num_output)
        for reason in call.finish_reasons:
            self._choices.labels(model, reason).inc()

    def _tenant_label(self, tenant_id: TenantId) -> str:
        if tenant_id not in self._tenants:
            if len(self._tenants) >= self._max_tenants:
                return _OTHER_TENANT
            self._tenants.add(tenant_id)
        return tenant_id

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help_text: str, labels: list[str]) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)
