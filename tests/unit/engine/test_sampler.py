"""The batched sampler against an oracle that does one row at a time, step by step, in NumPy's float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import GenerationRequest, SamplingParams, StopConditions
from headrace.engine.distribution import draw
from headrace.engine.random import row_keys
from headrace.engine.sampler import Sampler

CPU = torch.device("cpu")


def adjusted(logits, params, prompt, output, barred=()):
    logits = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in barred:
        logits[token] = -np.inf
    return logits


def kept_tokens(logits, params):
    """Probabilities after temperature, top_k, top_p and min_p, in the order of token ids."""
    tempered = logits / params.temperature
    weights = np.exp(tempered - tempered.max())
    order = np.argsort(-weights, kind="stable")
    kept = np.zeros(len(logits), bool)
    limit = params.top_k or len(logits)
    inside = order[:limit]
    mass = weights[inside].sum()
    before = 0.0
    for token in inside:
        if before >= params.top_p * mass and params.top_p < 1.0:
            break
        if weights[token] < params.min_p and kept.any():
            break
        kept[token] = True
        before += weights[token]
    weights[~kept] = 0.0
    return weights / weights.sum()


def mixed(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def scores(logits, params, position):
    """What the tokens race with: the tempered logit less the logarithm of an exponential number, times T."""
    key0, key1 = (int(word) & 0xFFFFFFFF for word in row_keys(np.array([params.seed]), np.array([position]))[0])
    bits = [mixed(mixed(i * 0x9E3779B9 & 0xFFFFFFFF ^ key0) ^ key1) for i in range(len(logits))]
    unit = (np.array(bits, np.float64) + 0.5) / 2**32
    return logits - params.temperature * np.log(-np.log1p(-unit))


def sample(logits, rows):
    """``rows``: (params, prompt, output, stop, min_tokens) for each row of ``logits``."""
    sampler = Sampler(len(rows), CPU)
    positions = []
    for slot, (params, prompt, output, stop, min_tokens) in enumerate(rows):
        tokens = np.array([*prompt, *output], np.int64)
        request = GenerationRequest(
            SequenceId(str(slot)), TenantId("t"), list(prompt), StopConditions(9, stop, min_tokens), params
        )
        sampler.place(slot, request, np.array(prompt, np.int64), len(prompt))
        for token in output:
            sampler.append(slot, token)
        positions.append(len(tokens))
    return sampler.sample(torch.from_numpy(logits), np.arange(len(rows)), np.array(positions))


def keys_of(n, seed=9):
    return torch.from_numpy(row_keys(np.full(n, seed), np.arange(n)))


PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 10, 300, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, 400), st.floats(-20, 20, width=32), max_size=3),
)


@st.composite
def row(draw_):
    tokens = st.lists(st.integers(0, 400), max_size=12)
    return (
        draw_(PARAMS),
        [0, *draw_(tokens)],
        draw_(tokens),
        tuple(draw_(st.sets(st.integers(0, 400), max_size=3))),
        draw_(st.sampled_from([0, 0, 20])),
    )


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(row(), min_size=1, max_size=5), seed=st.integers(0, 2**32), scale=st.sampled_from([0.5, 3.0, 12.0])
)
def test_every_choice_is_one_the_oracle_could_make(rows, seed, scale):
    vocab = 700
    logits = (np.random.default_rng(seed).standard_normal((len(rows), vocab)) * scale).astype(np.float32)
    before = logits.copy()
    result = sample(logits, rows)
    assert (logits == before).all(), "the model's logits are left as they are"
    for i, (params, prompt, output, stop, min_tokens) in enumerate(rows):
        barred = stop if len(output) < min_tokens else ()
        target = adjusted(logits[i], params, prompt, output, barred)
        chosen = result.token_ids[i]
        if params.temperature == 0.0:
            assert target[chosen] >= target.max() - 1e-5
            continue
        position = len(prompt) + len(output)
        raced = np.where(kept_tokens(target, params) > 0, scores(target, params, position), -np.inf)
        # float32 adjustments differ a little from the oracle's, and so does what top_p keeps at its edge.
        if params.top_p == 1.0:
            assert raced[chosen] >= raced.max() - 1e-5
            continue
        widths = [params.top_p - 1e-5, params.top_p + 1e-5]
        narrow, wide = (kept_tokens(target, replace(params, top_p=p)) > 0 for p in widths)
        assert wide[chosen]
        raced = scores(target, params, position)
        assert raced[chosen] >= raced[narrow].max() - 1e-5


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(row(), min_size=2, max_size=20), seed=st.integers(0, 2**32))
def test_a_row_is_sampled_alone_as_it_is_in_a_batch(rows, seed):
    logits = (np.random.default_rng(seed).standard_normal((len(rows), 5003)) * 4).astype(np.float32)
    together = sample(logits, rows).token_ids
    alone = [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(len(rows))]
    assert together == alone


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.8, min_p=0.05),
    ],
    ids=["all", "tempered", "top_k", "top_p", "min_p", "everything"],
)
def test_frequencies_follow_the_distribution(params):
    n = 6_000
    logits = np.random.default_rng(5).standard_normal(40).astype(np.float32) * 1.5
    expected = kept_tokens(logits.astype(np.float64), params) * n
    one = torch.ones(n)
    chosen = draw(
        torch.from_numpy(logits).expand(n, -1),
        one * params.temperature,
        torch.full((n,), params.top_k),
        one * params.top_p,
        one * params.min_p,
        keys_of(n),
    )
    counts = np.bincount(chosen.numpy(), minlength=40)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    # Five standard deviations of a chi-square variable above its mean.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("k", [1, 2, 3, 255, 256, 257, 300])
def test_of_equal_tokens_at_the_edge_the_lower_ids_stay(k):
    n = 6_400
    logits = torch.zeros(1, 600)
    chosen = draw(
        logits.expand(n, -1),
        torch.ones(n),
        torch.full((n,), k),
        torch.ones(n),
        torch.zeros(n),
        keys_of(n),
    )
    assert set(chosen.tolist()) == set(range(k))


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 49_152])
def test_a_token_without_weight_is_never_chosen(vocab):
    n = 20
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, vocab // 2] = -1e30
    for top_p in (1.0, 0.5):
        chosen = draw(
            logits.expand(n, -1), torch.ones(n), torch.zeros(n, dtype=torch.int64), torch.full((n,), top_p),
            torch.zeros(n), keys_of(n),
        )  # fmt: skip
        assert chosen.tolist() == [vocab // 2] * n


def test_a_wide_nucleus_is_found_whole():
    # 20,000 almost equal tokens: neither window of the search holds half of their mass.
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(1)) * 0.01
    n = 100
    chosen = draw(
        logits.expand(n, -1),
        torch.ones(n),
        torch.zeros(n, dtype=torch.int64),
        torch.full((n,), 0.5),
        torch.zeros(n),
        keys_of(n),
    )
    likeliest = set(logits[0].argsort(descending=True)[:10_200].tolist())
    assert set(chosen.tolist()) <= likeliest
    assert chosen.max() - chosen.min() > 15_000


def test_logprobs_are_of_the_raw_distribution():
    logits = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32)
    biased = SamplingParams(temperature=0.0, logprobs=3, logit_bias={7: 50.0})
    result = sample(
        logits,
        [
            (biased, [1], [], (), 0),
            (SamplingParams(temperature=0.0), [1], [], (), 0),
            (SamplingParams(seed=4, logprobs=0), [1], [], (), 0),
        ],
    )
    log_softmax = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    first = result.logprobs[0]
    assert first.token_id == result.token_ids[0] == 7
    assert first.logprob == pytest.approx(log_softmax[0, 7], abs=1e-5)
    assert first.rank == 1 + (logits[0] > logits[0, 7]).sum()
    assert [token for token, _ in first.top] == np.argsort(-logits[0])[:3].tolist()
    assert [value for _, value in first.top] == pytest.approx(np.sort(log_softmax[0])[::-1][:3].tolist(), abs=1e-5)
    assert 1 not in result.logprobs
    assert result.logprobs[2].top == []
    assert result.logprobs[2].token_id == result.token_ids[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_takes_the_first_of_the_likeliest_in_any_dtype(dtype):
    logits = torch.zeros(2, 300, dtype=dtype)
    logits[0, [20, 250]] = 3.0
    sampler = Sampler(2, CPU)
    assert sampler.sample(logits, np.array([0, 1]), np.array([4, 4])).token_ids == [20, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_numbers_are_named(value, temperature):
    logits = np.zeros((3, 20), np.float32)
    logits[1, :] = value
    plain = (SamplingParams(temperature=temperature), [1], [], (), 0)
    assert sample(logits, [plain, plain, plain]).broken_rows == {1}


def test_a_vanishing_temperature_is_greedy():
    logits = np.random.default_rng(2).standard_normal((1, 50)).astype(np.float32)
    for temperature in (1e-300, 1e-40, 1e-5):
        row_ = (SamplingParams(temperature=temperature), [1], [], (), 0)
        assert sample(logits, [row_]).token_ids == [int(logits.argmax())]
