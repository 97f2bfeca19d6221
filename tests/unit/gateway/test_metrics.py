"""The token histogram, and labels that stay few."""

from prometheus_client.parser import text_string_to_metric_families

from headrace.core.clock import ManualClock
from headrace.core.ids import TenantId
from headrace.gateway.auth import new_key
from headrace.gateway.call import Call
from headrace.gateway.config import GatewayConfig
from headrace.gateway.metrics import GatewayMetrics
from headrace.ports.store import Role

CONFIG = GatewayConfig(salt_secret="x" * 16)


def samples(metrics):
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_token_gaps_count_each_token_once():
    metrics = GatewayMetrics(10)
    metrics.token_gaps.observe("m", 0.004, 1)
    metrics.token_gaps.observe("m", 0.2, 4)
    metrics.token_gaps.observe("m", 99.0, 1)
    found = samples(metrics)
    name = "vllm:inter_token_latency_seconds"
    assert found[f"{name}_count", (("model_name", "m"),)] == 6
    assert found[f"{name}_sum", (("model_name", "m"),)] == 99.204
    assert found[f"{name}_bucket", (("le", "0.005"), ("model_name", "m"))] == 1
    assert found[f"{name}_bucket", (("le", "0.05"), ("model_name", "m"))] == 5
    assert found[f"{name}_bucket", (("le", "10.0"), ("model_name", "m"))] == 5


def test_tenants_beyond_the_limit_share_a_label():
    metrics = GatewayMetrics(2)
    for i in range(5):
        scope = {"type": "http", "method": "GET", "headers": [], "path": "/"}
        call = Call(scope, None, None, CONFIG, ManualClock())
        call.status = 200
        _, call.key = new_key(TenantId(f"tenant-{i}"), Role.TENANT, created_at=0.0)
        metrics.finished(call, "/v1/models")
    found = {
        labels[0][1]: v for (name, labels), v in samples(metrics).items() if name == "headrace_tenant_requests_total"
    }
    assert found == {"tenant-0": 1, "tenant-1": 1, "other": 3}


def test_methods_that_callers_make_up_share_a_label():
    metrics = GatewayMetrics(2)
    call = Call({"type": "http", "method": "BREW", "headers": [], "path": "/"}, None, None, CONFIG, ManualClock())
    call.status = 405
    metrics.finished(call, "unknown")
    assert ("headrace_requests_total", (("method", "other"), ("route", "unknown"), ("status", "405"))) in samples(
        metrics
    )
