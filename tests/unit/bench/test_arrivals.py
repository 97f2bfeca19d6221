import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.arrivals import Arrival, offered_rate, poisson, read_trace, rescale
from headrace.core.errors import InvalidRequest

LENGTHS = {"prompt_tokens": 7, "output_tokens": 3}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:51.2224670,0,0\n"
)


@given(rate=st.floats(0.01, 1000), num=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_poisson_arrivals_are_in_order_and_a_pure_function_of_the_seed(rate: float, num: int, seed: int) -> None:
    arrivals = poisson(rate, num, seed=seed, **LENGTHS)
    assert len(arrivals) == num
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert all(at > 0 for at in times)
    assert arrivals == poisson(rate, num, seed=seed, **LENGTHS)


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential(rate: float) -> None:
    times = [arrival.at_s for arrival in poisson(rate, 20_000, seed=3, **LENGTHS)]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # The mean's standard error is 0.7 %, the variance's 2 %: five of them.
    assert mean == pytest.approx(1 / rate, rel=0.035)
    assert variance == pytest.approx(1 / rate**2, rel=0.12)


def test_other_seeds_give_other_arrivals() -> None:
    assert poisson(1.0, 5, seed=0, **LENGTHS) != poisson(1.0, 5, seed=1, **LENGTHS)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(InvalidRequest, match=r"arrival rate is"):
        poisson(rate, 5, seed=0, **LENGTHS)
    with pytest.raises(InvalidRequest, match=r"arrival rate is"):
        rescale([Arrival(1.0, 1, 1)], rate=rate)


@given(
    times=st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(lambda times: max(times) > 1e-3),
    rate=st.floats(0.01, 1000),
)
def test_rescaling_sets_the_rate_and_keeps_order_lengths_and_shape(times: list[float], rate: float) -> None:
    arrivals = [Arrival(at, index + 1, index + 2) for index, at in enumerate(sorted(times))]
    scaled = rescale(arrivals, rate=rate)
    assert offered_rate(scaled) == pytest.approx(rate)
    assert [arrival.prompt_tokens for arrival in scaled] == [arrival.prompt_tokens for arrival in arrivals]
    factor = scaled[-1].at_s / arrivals[-1].at_s
    assert [arrival.at_s for arrival in scaled] == pytest.approx([arrival.at_s * factor for arrival in arrivals])


def test_arrivals_all_at_once_cannot_be_stretched() -> None:
    with pytest.raises(InvalidRequest, match="spans no time"):
        rescale([Arrival(0.0, 1, 1)] * 3, rate=1.0)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure_trace_is_sorted_and_starts_at_zero(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(AZURE.encode()) if name.endswith(".gz") else AZURE.encode())
    arrivals = read_trace(path)
    assert [(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals] == [(374, 44), (396, 109), (1, 1)]
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-5)
    assert read_trace(path, limit=2) == arrivals[:2]


def test_mooncake_trace_counts_in_milliseconds(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 20, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1000, "input_length": 10, "output_length": 4, "hash_ids": [0]},
    ]
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    assert read_trace(path) == [Arrival(0.0, 10, 4), Arrival(2.0, 20, 5)]


def test_plain_formats(tmp_path: Path) -> None:
    csv = tmp_path / "p.csv"
    csv.write_text("note,time,prompt_tokens,output_tokens\nx,1.5,10,4\ny,2,20,5\n")
    jsonl = tmp_path / "p.jsonl"
    jsonl.write_text(
        '{"time": 1.5, "prompt_tokens": 10, "output_tokens": 4}\n\n{"time": 2, "prompt_tokens": 20, "output_tokens": 5}'
    )
    assert read_trace(csv) == read_trace(jsonl) == [Arrival(0.0, 10, 4), Arrival(0.5, 20, 5)]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("t.txt", b"", r"ends in \.csv"),
        ("t.csv", b"", "columns must be"),
        ("t.csv", b"a,b,c\n1,2,3\n", "columns must be"),
        ("t.csv", b"time,prompt_tokens,output_tokens\n", "no requests"),
        ("t.csv", b"time,prompt_tokens,output_tokens\n1,2\n", "line 2"),
        ("t.csv", b"time,prompt_tokens,output_tokens\n1,2,3\nnoon,2,3\n", "line 3"),
        ("t.csv", b"time,prompt_tokens,output_tokens\n1,-2,3\n", "cannot be negative"),
        ("t.csv", b"time,prompt_tokens,output_tokens\nnan,2,3\n", "not a finite number"),
        ("t.csv", b"time,prompt_tokens,output_tokens\n1,2,1e3\n", "line 2"),
        ("t.csv", b"\xff\xfe\x00", "UTF-8"),
        ("t.csv.gz", b"not gzip", "cannot read"),
        ("t.csv.gz", gzip.compress(AZURE.encode())[:-9], "cannot read"),
        ("t.jsonl", b"\n\n", "no requests"),
        ("t.jsonl", b"{", "line 1"),
        ("t.jsonl", b"[1]", "line 1"),
        ("t.jsonl", b'{"timestamp": 0, "input_length": "many", "output_length": 1}', "line 1"),
        ("t.jsonl", b'{"time": 0, "prompt_tokens": 1}', "line 1.*output_tokens"),
        ("t.jsonl", b'{"time": 0, "prompt_tokens": 1, "output_tokens": -1}', "negative"),
    ],
)
def test_nonsense_is_refused_with_the_place(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=match) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")


@given(data=st.binary(max_size=200), suffix=st.sampled_from([".csv", ".jsonl", ".csv.gz", ".jsonl.gz"]))
def test_whatever_bytes_a_trace_holds_the_answer_is_arrivals_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("trace") / f"t{suffix}"
    path.write_bytes(data)
    with pytest.raises(InvalidRequest):
        # Random bytes are never a valid trace of these formats.
        read_trace(path)
