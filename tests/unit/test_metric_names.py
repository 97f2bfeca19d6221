"""A name that two processes expose is counted twice by every dashboard that sums over a platform."""

from headrace.core.frames import EngineLoad, EngineStats
from headrace.gateway.metrics import GatewayMetrics
from headrace.worker.metrics import WorkerMetrics


def names(exposition: bytes) -> set[str]:
    lines = exposition.decode().splitlines()
    return {line.split()[2] for line in lines if line.startswith("# TYPE ")}


def test_no_name_is_told_by_gateways_and_workers_both() -> None:
    load = EngineLoad(0, 0, 0, 1, 1, 0, 0.0, 0.0)
    stats = EngineStats(load, 0, 0.0, True, False, 0, 0, 0, 0, {}, 0, 0, {})
    gateway = names(GatewayMetrics(max_tenant_labels=1).exposition())
    worker = names(WorkerMetrics("m").exposition(stats, healthy=True))
    assert any(name.startswith("vllm:") for name in gateway)
    assert any(name.startswith("vllm:") for name in worker)
    assert gateway & worker == set()
