from collections.abc import Callable

import numpy as np
import pytest

from headrace.core.errors import ContextLengthExceeded, InvalidRequest
from headrace.core.requests import FinishReason, ServiceClass
from headrace.engine.scheduler import Limits

PROMPTS = [[5, 6, 7], list(range(40)), [9], list(range(10, 31)), [*list(range(40)), 3], [2] * 17]

SETTINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "seeded penalties": {"temperature": 1.1, "seed": 11, "frequency_penalty": 0.6, "logit_bias": {4: 2.5}},
}


def oracle(logits_after: Callable[..., np.ndarray], prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


def batch_of(make_request, **sampling):
    return [make_request(f"s/{i}", prompt, 12, **sampling) for i, prompt in enumerate(PROMPTS)]


def alone(make_bench, make_request, **sampling):
    """Each prompt by itself on an engine of its own."""
    return [make_bench().generate(request)[0] for request in batch_of(make_request, **sampling)]


def test_greedy_follows_the_model(make_bench, make_request, stub_logits):
    expected = [oracle(stub_logits, prompt, 12) for prompt in PROMPTS]
    assert make_bench().generate(*batch_of(make_request)) == expected


ARRANGEMENTS = {
    "batched": Limits(64, 4, 8, 64),
    "in small chunks": Limits(64, 4, 8, 8),
    "without a prefix cache": Limits(64, 4, 8, 32, prefix_cache=False),
    "with preemption": Limits(16, 4, 8, 32),
    "two at a time": Limits(64, 4, 2, 32),
}


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("limits", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_the_arrangement_does_not_change_tokens(make_bench, make_request, limits, sampling):
    bench = make_bench(limits)
    assert bench.generate(*batch_of(make_request, **sampling)) == alone(make_bench, make_request, **sampling)


def test_the_arrangement_with_preemption_does_preempt(make_bench, make_request):
    bench = make_bench(ARRANGEMENTS["with preemption"])
    bench.generate(*batch_of(make_request))
    assert bench.core.meter.num_preemptions > 0


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_a_prefix_hit_does_not_change_tokens(make_bench, make_request, sampling):
    bench = make_bench()
    first = bench.generate(make_request("a", range(40), **sampling))
    again = bench.generate(make_request("b", range(40), **sampling))
    assert again == first
    assert bench.last("b").timing.num_cached_tokens == 36, "all but the block that holds the last token"


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("num_before", [1, 5, 11])
def test_a_resumed_generation_goes_on_as_if_nothing_had_happened(make_bench, make_request, sampling, num_before):
    prompt = list(range(10))
    (whole,) = make_bench().generate(make_request("a", prompt, 12, **sampling))
    resumed = make_request("b", prompt + whole[:num_before], 12 - num_before, num_resumed=num_before, **sampling)
    assert make_bench().generate(resumed) == [whole[num_before:]]


def test_a_hit_needs_the_same_salt(make_bench, make_request):
    bench = make_bench()
    bench.generate(make_request("a", range(40), salt="x"))
    bench.generate(make_request("b", range(40), salt="y"))
    assert bench.last("b").timing.num_cached_tokens == 0
    bench.generate(make_request("c", range(40), salt="x"))
    assert bench.last("c").timing.num_cached_tokens == 36


def test_a_burst_with_one_prompt_computes_it_once(make_bench, make_request):
    bench = make_bench()
    requests = [make_request(f"s/{i}", range(40), 4, temperature=1.0, seed=i) for i in range(6)]
    bench.generate(*requests)
    computed = sum(batch.num_tokens for batch in bench.model.batches)
    # Forty tokens once, then for each its last block of four and three decoding steps.
    assert computed <= 40 + 6 * (4 + 3)


def test_tokens_that_only_wait_for_a_prefix_hold_up_nobody(make_bench, make_request):
    bench = make_bench(Limits(64, 4, 8, 8))
    bench.core.add(make_request("leader", range(40), 2))
    bench.core.add(make_request("follower", range(40), 2))
    bench.core.add(make_request("other", [90, 91], 2))
    # The leader's chunks take the whole budget, so the other starts when the last one leaves room; never later.
    bench.run()
    first = {
        name: next(i for i, f in enumerate(bench.frames) if any(d.sequence_id == name for d in f.deltas))
        for name in ("leader", "follower", "other")
    }
    assert first["other"] <= first["follower"]


def test_stop_tokens_end_a_sequence_and_are_reported(make_bench, make_request, stub_logits):
    expected = oracle(stub_logits, PROMPTS[0], 12)
    bench = make_bench()
    (tokens,) = bench.generate(make_request("a", PROMPTS[0], 12, stop=(expected[3],)))
    assert tokens == expected[: expected.index(expected[3]) + 1]
    assert bench.last("a").finish is FinishReason.STOP


def test_stop_tokens_are_barred_until_min_tokens_exist(make_bench, make_request, stub_logits):
    stop = oracle(stub_logits, PROMPTS[0], 1)[0]
    bench = make_bench()
    (tokens,) = bench.generate(make_request("a", PROMPTS[0], 12, stop=(stop,), min_tokens=5))
    assert stop not in tokens[:5]
    assert len(tokens) >= 5


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 1), (5, 5), (100, 13)])
def test_length_ends_at_max_tokens_or_the_context(make_bench, make_request, max_tokens, expected):
    bench = make_bench(max_model_len=16)
    (tokens,) = bench.generate(make_request("a", [1, 2, 3], max_tokens))
    assert len(tokens) == expected
    assert bench.last("a").finish is FinishReason.LENGTH


def test_the_longest_prompt_gets_its_one_token(make_bench, make_request):
    assert len(make_bench(max_model_len=16).generate(make_request("a", [1] * 15, 5))[0]) == 1


def test_a_prompt_without_room_for_a_token_is_refused(make_bench, make_request):
    with pytest.raises(ContextLengthExceeded, match="16 tokens; this model takes at most 15"):
        make_bench(max_model_len=16).core.add(make_request("a", [1] * 16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [97]}, "prompt holds token 97; ids go from 0 to 96"),
        ({"prompt": [-1]}, "prompt holds token -1"),
        ({"logit_bias": {97: 1.0}}, "logit_bias holds token 97"),
        ({"stop": (500,)}, "stop_token_ids holds token 500"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"num_resumed": 3}, "num_resumed_tokens is 3"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"max_tokens": 100}, "need 26 blocks of 4 tokens; this engine's KV cache has 20"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_taken(make_bench, make_request, changes, message):
    bench = make_bench(Limits(20, 4, 8, 32))
    with pytest.raises(InvalidRequest, match=message):
        bench.core.add(make_request("a", **changes))
    assert not bench.core.has_news


def test_a_sequence_id_in_flight_is_refused_and_free_again_afterwards(make_bench, make_request):
    bench = make_bench()
    bench.core.add(make_request("a"))
    with pytest.raises(InvalidRequest, match="in flight"):
        bench.core.add(make_request("a"))
    bench.run()
    bench.core.add(make_request("a"))
    bench.core.abort("a")
    bench.run()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_is_told_in_the_next_frame_and_frees_everything(make_bench, make_request, num_steps):
    bench = make_bench(Limits(64, 4, 8, 8))
    bench.core.add(make_request("a", range(20), 50))
    for _ in range(num_steps):
        bench.step()
    bench.core.abort("a")
    frame = bench.step()
    assert [(d.sequence_id, d.finish) for d in frame.deltas] == [("a", FinishReason.ABORT)]
    assert frame.load.num_free_blocks == 64
    assert frame.step == num_steps, "no step was made"
    bench.run()


def test_aborting_the_one_others_wait_for_lets_them_go_on(make_bench, make_request):
    bench = make_bench(Limits(64, 4, 8, 8))
    expected = make_bench().generate(make_request("b", range(40)))
    bench.core.add(make_request("a", range(40)))
    bench.core.add(make_request("b", range(40)))
    bench.step()
    bench.core.abort("a")
    bench.run()
    assert [bench.tokens("b")] == expected


def test_unknown_aborts_are_ignored(make_bench):
    bench = make_bench()
    bench.core.abort("nobody")
    assert not bench.core.has_news


def test_service_counts_tokens_computed_for_each_tenant(make_bench, make_request):
    bench = make_bench()
    bench.generate(make_request("a", range(10), 3, tenant="x"), make_request("b", [50, 51], 2, tenant="y"))
    total = {"x": 0, "y": 0}
    for frame in bench.frames:
        for tenant, count in frame.service.items():
            total[tenant] += count
    assert total == {"x": 12, "y": 3}, "the last token of each is never computed"


def test_load_and_stats_add_up(make_bench, make_request):
    bench = make_bench(Limits(64, 4, 2, 8), capacity=5)
    for i in range(3):
        bench.core.add(make_request(f"s/{i}", [i] * 6, 3))
    load = bench.core.load()
    assert (load.num_running, load.num_waiting, load.num_queued_tokens, load.credit) == (0, 3, 15, 2)
    frame = bench.step()
    assert (frame.load.num_running, frame.load.num_waiting) == (2, 1)
    bench.run()
    stats = bench.core.stats()
    assert stats.num_finished == {"length": 3}
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.blocks_in_use) == (18, 9, 0)
    assert stats.load.credit == 5
    assert stats.load.prefill_tokens_per_s > 0
    assert stats.load.step_s > 0


def test_timing_covers_wait_prefill_and_decode(make_bench, make_request):
    bench = make_bench()
    bench.generate(make_request("a", range(30), 4))
    timing = bench.last("a").timing
    assert timing.wait_s >= 0
    assert timing.prefill_s > 0
    assert timing.decode_s > 0


def test_the_lowest_class_is_preempted_first_and_still_finishes(make_bench, make_request):
    bench = make_bench(Limits(12, 4, 4, 16))
    bench.core.add(make_request("batch", [1] * 9, 20, service_class=ServiceClass.BATCH))
    bench.core.add(make_request("default", [2] * 9, 20))
    bench.run()
    assert bench.last("batch").timing.num_preemptions > 0
    assert bench.last("default").timing.num_preemptions == 0
    assert len(bench.tokens("batch")) == 20


class Boom(Exception):
    pass


def test_a_sequence_that_fails_alone_fails_alone(make_bench, make_request):
    bench = make_bench()

    def poison(batch):
        if ((batch.token_ids == 68) & (batch.positions == 1)).any():
            raise Boom

    bench.model.before = poison
    expected = alone(make_bench, make_request)
    got = bench.generate(make_request("bad", [1, 68], 5), *batch_of(make_request))
    assert got[1:] == expected
    assert bench.last("bad").finish is FinishReason.ERROR
    assert "engine failed" in bench.last("bad").error
    assert bench.core.num_failed_steps == 0


def test_a_step_that_fails_for_everybody_ends_those_it_held(make_bench, make_request):
    bench = make_bench()
    failures = iter([True, True, True])

    def fail_thrice(batch):
        if next(failures, False):
            raise Boom

    bench.model.before = fail_thrice
    bench.generate(make_request("a", [1, 2]), make_request("b", [3, 4]))
    assert bench.last("a").finish is FinishReason.ERROR
    assert bench.last("b").finish is FinishReason.ERROR
    assert bench.core.num_failed_steps == 1
    bench.generate(make_request("c", [1, 2]))
    assert bench.last("c").finish is FinishReason.LENGTH
    assert bench.core.num_failed_steps == 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"top_p": 0.5, "temperature": 0.5, "logprobs": 2}])
def test_logits_that_are_no_numbers_end_their_sequence_only(make_bench, make_request, sampling):
    bench = make_bench()
    forward = bench.core._runner._forward

    def with_nan(batch):
        logits = forward(batch)
        for row, token in enumerate(batch.logit_rows):
            if batch.token_ids[token] == 66:
                logits[row, 5] = float("nan")
        return logits

    bench.core._runner._forward = with_nan
    (expected,) = make_bench().generate(make_request("good", [1, 2, 3], **sampling))
    bad, good = bench.generate(make_request("bad", [1, 66], **sampling), make_request("good", [1, 2, 3], **sampling))
    assert bad == []
    assert bench.last("bad").error == "the model's output for this sequence was not a number"
    assert good == expected


def test_blocks_of_a_failed_sequence_are_not_shared(make_bench, make_request):
    bench = make_bench(Limits(64, 4, 8, 16))

    def poison(batch):
        if 66 in batch.token_ids:
            raise Boom

    bench.model.before = poison
    prompt = [*list(range(30)), 66]
    bench.generate(make_request("bad", prompt))
    bench.generate(make_request("next", prompt[:20]))
    assert bench.last("next").timing.num_cached_tokens == 0


def test_after_failing_everything_the_core_starts_over(make_bench, make_request):
    bench = make_bench()
    bench.core.add(make_request("a", range(20)))
    bench.step()
    bench.core.fail_all("all is lost")
    bench.run()
    assert (bench.last("a").finish, bench.last("a").error) == (FinishReason.ERROR, "all is lost")
    bench.generate(make_request("b"))
    assert bench.last("b").finish is FinishReason.LENGTH
