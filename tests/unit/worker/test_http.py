import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.errors import ConfigError
from headrace.core.wire import Submit
from headrace.worker.http import HttpServer


async def get(hosted, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{hosted.service.http_address}{path}") as response,
    ):
        return response.status, await response.text()


async def samples(hosted) -> dict[tuple[str, str], float]:
    """Value by metric name and the label that is not the model's name."""
    status, text = await get(hosted, "/metrics")
    assert status == 200
    return {
        (sample.name, next((v for k, v in sample.labels.items() if k != "model_name"), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["model_name"] == "fake"
    }


async def test_metrics_carry_both_names_and_the_engine_s_numbers(host, request_for) -> None:
    async with host(http=True) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 10)), Submit(request_for("b", 5)))
        await client.until(lambda: client.ended("a", "b"))
        found = await samples(hosted)

        for prefix in ("vllm:", "headrace_worker_"):
            assert found[prefix + "generation_tokens_total", ""] == 15
            assert found[prefix + "prompt_tokens_total", ""] == 6
            assert found[prefix + "request_success_total", "length"] == 2
            assert found[prefix + "request_success_total", "abort"] == 0
            assert found[prefix + "num_requests_running", ""] == 0
            assert found[prefix + "num_requests_waiting", ""] == 0
            assert found[prefix + "kv_cache_usage_perc", ""] == 0
            assert found[prefix + "prefix_cache_queries_total", ""] == 6
            assert found[prefix + "prefix_cache_hits_total", ""] == 0
            assert found[prefix + "num_preemptions_total", ""] == 0
            assert found[prefix + "request_queue_time_seconds_count", ""] == 2
        for name in ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"):
            assert found["headrace_worker_" + name, ""] == 2
        assert found["headrace_worker_connections", ""] == 1
        assert found["headrace_worker_healthy", ""] == 1


async def test_health_and_readiness_follow_the_engine(host, request_for, eventually) -> None:
    async with host(http=True, worker={"stall_timeout_s": 0.1}, stall_at_step=2) as hosted:
        assert (await get(hosted, "/healthz"))[0] == 200
        assert (await get(hosted, "/readyz"))[0] == 200
        client = await hosted.client()
        client.send(Submit(request_for("a")))
        await eventually(lambda: not hosted.service.health.healthy)

        status, text = await get(hosted, "/healthz")
        assert status == 503
        assert "no step has finished" in text
        assert (await get(hosted, "/readyz"))[0] == 503
        assert (await samples(hosted))["headrace_worker_healthy", ""] == 0


async def test_a_draining_worker_is_healthy_but_not_ready(host, request_for) -> None:
    async with host(http=True, step_s=0.01) as hosted:
        client = await hosted.client()
        client.send(Submit(request_for("a", 100)))
        await client.until(lambda: len(client.tokens("a")) > 0)
        hosted.service.begin_drain()

        assert (await get(hosted, "/healthz"))[0] == 200
        assert (await get(hosted, "/readyz"))[0] == 503
        assert (await samples(hosted))["headrace_worker_draining", ""] == 1


async def test_metrics_answer_while_the_engine_does_not(host, monkeypatch) -> None:
    async with host(http=True) as hosted:
        before = await samples(hosted)

        async def never() -> None:
            raise TimeoutError

        monkeypatch.setattr(hosted.engine, "stats", never)
        assert (await samples(hosted)).keys() == before.keys()


def test_a_unix_socket_is_no_place_for_metrics() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        HttpServer(None, "unix:/x")  # type: ignore[arg-type]  # refused before it is looked at
