"""From bytes to valid requests."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.requests import MAX_SEED, ServiceClass
from headrace.gateway.config import GatewayConfig
from headrace.gateway.schema import choice_seed, parse_chat, parse_completion

CONFIG = GatewayConfig(salt_secret="x" * 16)
MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields):
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), CONFIG)


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "Hi", **fields}).encode(), CONFIG)


def test_the_defaults_are_openais():
    request = chat()
    params = request.params
    assert request.add_generation_prompt
    assert not params.stream
    assert not params.include_usage
    assert params.num_choices == 1
    assert params.max_tokens is None
    assert params.sampling.temperature == params.sampling.top_p == 1.0
    assert params.sampling.top_k == 0
    assert params.sampling.logprobs is None
    assert params.skip_special_tokens
    assert params.service_class is ServiceClass.DEFAULT
    assert completion().params.max_tokens == 16


def test_null_means_the_default():
    names = ("stream", "n", "max_tokens", "stop", "seed", "temperature", "top_p", "logit_bias", "tools", "logprobs")
    request = chat(**dict.fromkeys(names))
    assert request.params.sampling.temperature == 1.0


def test_what_changes_nothing_is_accepted():
    chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        modalities=["text"],
        safety_identifier="s",
        prompt_cache_key="k",
        verbosity="medium",
        reasoning_effort="none",
    )
    completion(best_of=1, suffix="", user="u")


def test_extensions_reach_the_sampler():
    params = chat(
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=[1, 2],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logit_bias={"7": -100},
        max_tokens=5,
    ).params
    assert params.sampling.top_k == 5
    assert params.sampling.min_p == 0.1
    assert params.sampling.repetition_penalty == 1.2
    assert params.sampling.logit_bias == {7: -100.0}
    assert params.min_tokens == 3
    assert params.ignore_eos
    assert params.stop_token_ids == (1, 2)
    assert params.include_stop
    assert not params.skip_special_tokens


def test_top_k_minus_one_keeps_all():
    assert chat(top_k=-1).params.sampling.top_k == 0


@pytest.mark.parametrize(
    ("tier", "expected"),
    [("auto", ServiceClass.DEFAULT), ("flex", ServiceClass.FLEX), ("priority", ServiceClass.PRIORITY)],
)
def test_service_tiers(tier, expected):
    assert chat(service_tier=tier).params.service_class is expected


def test_messages_become_what_templates_know():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    assert chat(messages=messages).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt, expected):
    assert completion(prompt=prompt).prompts == expected


def test_logprobs_of_both_endpoints():
    assert chat(logprobs=True).params.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.sampling.logprobs == 4
    assert chat(logprobs=False).params.sampling.logprobs is None
    assert completion(logprobs=0).params.sampling.logprobs == 0


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_64_bit_seed_is_one_of_ours(seed):
    first, second = (chat(seed=seed).params.sampling.seed for _ in range(2))
    assert first == second
    assert 0 <= first <= MAX_SEED


@given(st.integers(0, MAX_SEED))
def test_choices_have_seeds_of_their_own(seed):
    seeds = [choice_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= s <= MAX_SEED for s in seeds)
    assert seeds == [choice_seed(seed, index) for index in range(16)]


def test_an_empty_nucleus_is_the_likeliest_token_alone():
    params = chat(top_p=0).params
    assert (params.sampling.top_p, params.sampling.top_k) == (1.0, 1)


NUMBERS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "seed",
    "top_logprobs",
]
VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-5, 200), st.floats(-3, 3)
)


def outcome(call):
    """A result and no error, or no result and an error of ours."""
    try:
        return call(), None
    except HeadraceError as error:
        return None, error


@given(st.dictionaries(st.sampled_from(NUMBERS), VALUES, max_size=4))
def test_numbers_are_in_range_or_refused_by_name(fields):
    """Whatever the numbers, what comes through is inside the documented ranges."""
    params, error = outcome(lambda: chat(**fields).params)
    if error is not None:
        assert error.param in fields
        return
    params.sampling.check()
    assert 1 <= params.num_choices <= 128
    assert params.max_tokens is None or 1 <= params.max_tokens < 2**31
    assert params.min_tokens >= 0


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=12,
    )
)
def test_any_json_is_a_request_or_an_error_of_ours(value):
    for parse in (parse_chat, parse_completion):
        for document in (value, {"model": "m", "messages": value, "prompt": value}, {"model": value}):
            with pytest.raises(HeadraceError):
                parse(json.dumps({"x": 1, "document": document}).encode(), CONFIG)
            _, error = outcome(lambda parse=parse, document=document: parse(json.dumps(document).encode(), CONFIG))
            assert error is None or error.status == 400


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_of_ours(body):
    with pytest.raises(InvalidRequest):
        parse_chat(body, CONFIG)


def test_every_field_is_named_in_its_refusal():
    """The type of each field is wrong in turn; the error names the field and never another one."""
    wrong = {"oops": {"deep": [1]}}
    for name in ("model", "stream", "n", "stop", "seed", "temperature", "logit_bias", "metadata", "user", "top_k"):
        with pytest.raises(InvalidRequest) as raised:
            chat(**{name: wrong})
        assert (raised.value.param or "").split("[")[0].split(".")[0] == name
