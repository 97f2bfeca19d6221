import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.offline import generate, requests_of, time_round
from headrace.bench.workload import (
    JOB_NAMES,
    Rates,
    RoundTimes,
    Workload,
    export,
    load,
    median_rates,
    rates,
)
from headrace.core.errors import InternalError, InvalidRequest
from headrace.core.frames import EngineLoad, SequenceDelta, StepFrame
from headrace.core.requests import FinishReason, GenerationRequest

SMALL = Workload(num_prompts=3, prompt_tokens=5, output_tokens=4, vocab_size=5000)


def test_no_prompt_occurs_twice_in_all_rounds() -> None:
    prompts = [tuple(prompt) for number in range(3) for job in SMALL.jobs(number) for prompt in job.prompts]
    assert len(prompts) == 3 * (1 + 1 + 3 + 3)
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {5}


def test_jobs_have_the_shapes_that_the_rates_are_computed_from() -> None:
    shapes = {job.name: (len(job.prompts), job.output_tokens) for job in SMALL.jobs(1)}
    assert shapes == {"first_token": (1, 1), "one_stream": (1, 4), "prefill": (3, 1), "whole": (3, 4)}
    assert tuple(shapes) == JOB_NAMES


def test_the_exported_file_holds_exactly_the_jobs(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    export(SMALL, 2, path)
    file = load(path)
    assert file.workload == SMALL
    assert file.rounds == [SMALL.jobs(number) for number in range(3)]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"workload": {}, "rounds": [[{"name": "nap"}]]}'])
def test_a_file_that_is_no_workload_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="not a workload file"):
        load(path)


@pytest.mark.parametrize("workload", [Workload(num_prompts=0), Workload(prompt_tokens=0), Workload(output_tokens=1)])
def test_a_workload_without_rates_is_refused(workload: Workload) -> None:
    with pytest.raises(InvalidRequest, match="it needs at least"):
        workload.check()


@given(prefill=st.floats(100, 10_000), decode=st.floats(100, 10_000), one=st.floats(1, 200), ttft=st.floats(0.001, 1.0))
def test_rates_recover_what_an_ideal_engine_does(prefill: float, decode: float, one: float, ttft: float) -> None:
    workload = Workload()
    prefill_s = 64 * 128 / prefill
    whole_s = prefill_s + 64 * 63 / decode
    found = rates(workload, RoundTimes(ttft, ttft + 63 / one, prefill_s, whole_s))
    assert found.prefill_tokens_per_s == pytest.approx(prefill)
    assert found.decode_tokens_per_s == pytest.approx(decode)
    assert found.one_stream_tokens_per_s == pytest.approx(one)
    assert found.ttft_s == ttft
    assert found.whole_tokens_per_s == pytest.approx(64 * 64 / whole_s)


def test_a_difference_lost_in_noise_gives_no_rate() -> None:
    found = rates(Workload(), RoundTimes(first_token=2.0, one_stream=1.0, prefill=2.0, whole=2.0))
    assert (found.decode_tokens_per_s, found.one_stream_tokens_per_s) == (0.0, 0.0)


def test_medians_are_taken_rate_by_rate() -> None:
    samples = [Rates(1, 30, 5, 1, 1), Rates(2, 10, 6, 1, 3), Rates(3, 20, 4, 1, 2)]
    assert median_rates(samples) == Rates(2, 20, 5, 1, 2)


class FakeCore:
    """One token per sequence and step; ``finish`` chooses how sequences end."""

    def __init__(self, finish: FinishReason = FinishReason.LENGTH, *, short_by: int = 0, forgets: bool = False) -> None:
        self._left: dict[str, list[object]] = {}
        self._finish = finish
        self._short_by = short_by
        self._forgets = forgets
        self._tokens = itertools.count()
        self.requests: list[GenerationRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self._left[request.sequence_id] = [request, request.stop.max_tokens - self._short_by]

    def step(self) -> StepFrame:
        deltas = []
        for sequence_id, entry in list(self._left.items()):
            request, left = entry
            assert isinstance(request, GenerationRequest)
            assert isinstance(left, int)
            entry[1] = left - 1
            done = entry[1] <= 0
            if done:
                del self._left[sequence_id]
            deltas.append(
                SequenceDelta(
                    request.sequence_id, [next(self._tokens)], finish=self._finish if done else None, error="why"
                )
            )
        if self._forgets:
            self._left.clear()
        return StepFrame(0, deltas, EngineLoad(0, 0, 0, 0, 0, 0, 0.0, 0.0))


def test_a_round_times_every_job_and_submits_all_prompts_at_once() -> None:
    core, seen = FakeCore(), []
    times = time_round(core, SMALL, 1, lambda job, seconds: seen.append((job.name, seconds)))
    assert [name for name, _ in seen] == list(JOB_NAMES)
    assert all(seconds > 0 for seconds in (times.first_token, times.one_stream, times.prefill, times.whole))
    assert [request.prompt for request in core.requests] == [prompt for job in SMALL.jobs(1) for prompt in job.prompts]
    assert all(request.sampling.greedy and not request.stop.stop_token_ids for request in core.requests)


def test_outputs_come_back_in_the_order_of_the_requests() -> None:
    job = SMALL.jobs(0)[-1]
    assert generate(FakeCore(), requests_of(job, "x")) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_a_short_answer_spoils_the_figure() -> None:
    with pytest.raises(InternalError, match="not 4 tokens"):
        time_round(FakeCore(short_by=1), SMALL, 0)


@pytest.mark.parametrize(
    ("core", "match"),
    [
        (FakeCore(FinishReason.ERROR), "why"),
        (FakeCore(FinishReason.ABORT), "abort"),
        (FakeCore(forgets=True), "no work"),
    ],
)
def test_an_engine_that_loses_a_sequence_has_no_figure(core: FakeCore, match: str) -> None:
    with pytest.raises(InternalError, match=match):
        generate(core, requests_of(SMALL.jobs(0)[-1], "x"))
