"""Ids, timings, metrics and the log."""

import re

import pytest
from structlog.testing import capture_logs

from headrace.gateway.timing import STAGES

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SECRET = "the secret of the prompt"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 9}


@pytest.mark.parametrize("given", ["abc-123", "a.b:c_d", "x" * 128])
async def test_a_valid_request_id_is_echoed(platform, given):
    async with platform.http() as http:
        answer = await http.post(CHAT, json=BODY, headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "ä", "<script>"])
async def test_another_request_id_is_replaced(platform, given):
    async with platform.http() as http:
        answer = await http.get("/nowhere", headers={"x-request-id": given.encode()})
    assert re.fullmatch(r"req-[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_server_timing_has_the_stages(launch, fake_config):
    platform = await launch({"w0": fake_config(step_s=0.002)})
    async with platform.http() as http:
        whole = await http.post(CHAT, json=BODY)
        streamed = await http.post(CHAT, json={**BODY, "stream": True})
    timings = dict(re.findall(r"(\w+);dur=([\d.]+)", whole.headers["server-timing"]))
    assert tuple(timings) == STAGES
    assert float(timings["decode"]) >= 10
    assert all(float(timings[stage]) > 0 for stage in ("auth", "template", "tokenize", "queue", "detokenize"))
    assert re.findall(r"(\w+);dur=", streamed.headers["server-timing"]) == ["auth", "template", "tokenize"]
    comment = next(line for line in streamed.text.splitlines() if line.startswith(": server-timing "))
    timings = dict(re.findall(r"(\w+);dur=([\d.]+)", comment))
    assert tuple(timings) == STAGES
    assert float(timings["write"]) > 0


async def test_metrics_have_the_names_that_dashboards_ask_for(launch):
    platform = await launch()
    async with platform.http() as http:
        assert (await http.post(CHAT, json={**BODY, "n": 2})).status_code == 200
        assert (await http.post(CHAT, json={**BODY, "n": 0})).status_code == 400
        text = (await http.get("/metrics")).text
    for line in (
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="tiny"} 16.0',
        'vllm:inter_token_latency_seconds_bucket{le="+Inf",model_name="tiny"} 16.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'headrace_choices_total{finish_reason="length",model_name="tiny"} 2.0',
        'vllm:request_generation_tokens_sum{model_name="tiny"} 18.0',
        'headrace_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0',
        'headrace_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0',
        'headrace_errors_total{code="invalid_value",route="/v1/chat/completions"} 1.0',
        'headrace_tenant_tokens_total{direction="output",tenant="tenant-a"} 18.0',
        'headrace_request_stage_seconds_count{stage="decode"} 1.0',
        "headrace_requests_in_flight 0.0",
    ):
        assert line in text, text


async def test_what_callers_make_up_does_not_become_a_label(launch):
    platform = await launch()
    async with platform.http() as http:
        for i in range(5):
            await http.get(f"/made-up-{i}")
            await http.post(CHAT, json={**BODY, "model": f"made-up-{i}"})
            await http.request("DELETE", f"/v1/models/made-up-{i}")
        text = (await http.get("/metrics")).text
    assert "made-up" not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_has_one_line_and_no_prompt(platform, stream):
    with capture_logs() as logs:
        async with platform.http() as http:
            answer = await http.post(CHAT, json={**BODY, "stream": stream, "user": SECRET})
            await http.post(CHAT, json={**BODY, "stop": [SECRET, 5]})
        await platform.until(lambda: len(logs) == 2)
    assert SECRET not in str(logs)
    line = logs[0]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["status"] == 200
    assert line["tenant"] == "tenant-a"
    assert line["output_tokens"] == 9
    assert line["finish"] == "length"
    assert all(f"{stage}_ms" in line for stage in STAGES)
    assert platform.key.rpartition("-")[2] not in str(logs)
