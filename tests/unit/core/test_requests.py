import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.core.requests import MAX_SEED, SamplingParams

WRONG = {
    "seed": [-1, MAX_SEED + 1],
    "temperature": [-0.1, 2.1, math.nan, math.inf],
    "top_k": [-1, 2**31],
    "top_p": [0.0, -0.5, 1.1, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0.0, -1.0, 10.1, math.nan, math.inf],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "logit_bias": [{-1: 0.0}, {1: 100.5}, {1: math.nan}],
    "logprobs": [-1, 21],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_values_outside_their_domain_are_refused_by_name(name: str, value: object) -> None:
    params = msgspec.structs.replace(SamplingParams(), **{name: value})

    with pytest.raises(InvalidRequest) as caught:
        params.check()

    assert caught.value.param == ("top_logprobs" if name == "logprobs" else name)


@given(
    seed=st.integers(0, MAX_SEED),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
)
def test_values_inside_their_domain_pass(**values: object) -> None:
    SamplingParams(**values).check()  # type: ignore[arg-type]  # hypothesis chose the types


def test_zero_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.1).greedy
