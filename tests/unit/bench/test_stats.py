import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.client import RequestRecord
from headrace.bench.load import LoadResult
from headrace.bench.report import summarize_level
from headrace.bench.stats import Targets, summarize


def test_percentiles_interpolate_between_order_statistics() -> None:
    found = summarize([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found is not None
    assert (found.num, found.mean, found.p50, found.max) == (5, 3.0, 3.0, 5.0)
    assert found.p90 == pytest.approx(4.6)
    assert found.p99 == pytest.approx(4.96)


def test_an_empty_sample_has_no_numbers() -> None:
    assert summarize([]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
def test_percentiles_are_ordered_and_within_the_sample(sample: list[float]) -> None:
    found = summarize(sample)
    assert found is not None
    assert min(sample) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(sample)


@pytest.mark.parametrize(
    ("ttft", "tpot", "met"),
    [(0.1, 0.01, True), (0.11, 0.01, False), (0.1, 0.02, False), (None, 0.01, False), (0.1, None, True)],
)
def test_targets_bound_each_dimension(ttft: float | None, tpot: float | None, met: bool) -> None:
    assert Targets(ttft_s=0.1, tpot_s=0.01).met_by(ttft, tpot) is met


def test_no_targets_are_met_by_anything() -> None:
    assert Targets().met_by(None, None)


def record(start: float, chunks: list[float], *, tokens: int = 3, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        prompt_tokens=10,
        output_tokens=tokens,
        asked_output_tokens=3,
        error=error,
        intended_at=start,
        sent_at=start + 0.5,
        finished_at=(chunks[-1] if chunks else start) + 1,
        chunk_times=chunks,
        has_usage=True,
    )


def test_a_level_is_reduced_by_hand() -> None:
    records = [
        record(1.0, [3.0, 4.0, 5.0]),
        record(2.0, [3.0, 3.5, 4.0]),
        record(3.0, [4.0, 5.0], tokens=2),
        record(4.0, [], error="timeout"),
    ]
    level = summarize_level("x", LoadResult(0.0, records), Targets(ttft_s=1.5, tpot_s=0.5), offered_rate=1.0)
    assert level.duration_s == 6.0
    assert level.achieved_rate == pytest.approx(4 / 4.5)
    assert (level.num_requests, level.num_ok, level.num_short, level.errors) == (4, 3, 1, {"timeout": 1})
    assert (level.prompt_tokens, level.output_tokens) == (30, 8)
    assert level.output_tokens_per_s == pytest.approx(8 / 6)
    # TTFT: 2, 1, 1. TPOT: 1, 0.5, 1. Only the second meets both.
    assert level.goodput_per_s == pytest.approx(1 / 6)
    assert level.good_share == 0.25
    assert level.ttft is not None
    assert level.ttft.p50 == 1.0
    assert level.tpot is not None
    assert level.tpot.max == 1.0
    assert level.gap is not None
    assert level.gap.num == 5
    assert level.lateness is not None
    assert level.lateness.p50 == 0.5
    assert level.tokens_per_chunk == pytest.approx(1.0)


def test_a_joined_chunk_is_divided_over_its_tokens() -> None:
    assert record(0.0, [1.0, 3.0], tokens=5).tpot_s == pytest.approx(0.5)
    assert record(0.0, [1.0], tokens=5).tpot_s is None
    assert record(0.0, [1.0, 2.0], tokens=1).tpot_s is None


def test_requests_never_sent_count_as_failed_but_not_as_sent() -> None:
    records = [record(0.0, [1.0, 2.0, 3.0]), record(0.0, [], error="not_sent")]
    level = summarize_level("x", LoadResult(0.0, records), Targets())
    assert level.errors == {"not_sent": 1}
    assert level.achieved_rate == pytest.approx(1 / 0.5)
    assert level.good_share == 0.5
    assert level.lateness is not None
    assert level.lateness.num == 1


def test_nothing_succeeded() -> None:
    level = summarize_level("x", LoadResult(0.0, [record(0.0, [], error="connect")]), Targets())
    assert (level.num_ok, level.ttft, level.e2e, level.tokens_per_chunk) == (0, None, None, None)
    assert level.counted_by_usage
