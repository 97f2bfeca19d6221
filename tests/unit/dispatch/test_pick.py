from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.frames import EngineLoad
from headrace.core.ids import WorkerId
from headrace.dispatch.pick import Candidate, pick, predicted_waits_s

IDLE = EngineLoad(
    num_running=0,
    num_waiting=0,
    num_queued_tokens=0,
    num_free_blocks=1000,
    num_blocks=1000,
    credit=8,
    prefill_tokens_per_s=1000.0,
    step_s=0.01,
)


def candidate(name: str, load: EngineLoad = IDLE, max_model_len: int = 4096, **changes: object) -> Candidate:
    return Candidate(WorkerId(name), msgspec.structs.replace(load, **changes), 16, max_model_len)


loads = st.builds(
    EngineLoad,
    num_running=st.integers(0, 64),
    num_waiting=st.integers(0, 64),
    num_queued_tokens=st.integers(0, 100_000),
    num_free_blocks=st.integers(0, 1000),
    num_blocks=st.just(1000),
    credit=st.integers(-1, 3),
    prefill_tokens_per_s=st.sampled_from([0.0, 10.0, 1e3, 1e5]),
    step_s=st.sampled_from([0.0, 1e-3, 0.1]),
)


def test_nobody_is_picked_from_nobody() -> None:
    assert pick([], 10) is None


@given(st.lists(loads, max_size=6), st.integers(1, 5000), st.integers(0, 1000))
def test_picks_exactly_when_someone_has_credit_and_can_hold_the_prompt(
    all_loads: list[EngineLoad], num_prompt_tokens: int, rotation: int
) -> None:
    candidates = [candidate(str(i), load) for i, load in enumerate(all_loads)]
    able = {c.worker_id for c in candidates if c.load.credit > 0 and num_prompt_tokens < c.max_model_len}
    chosen = pick(candidates, num_prompt_tokens, rotation=rotation)
    assert (chosen in able) if able else (chosen is None)


@given(st.lists(loads, min_size=1, max_size=6), st.integers(1, 4000), st.integers(0, 1000))
def test_nobody_with_credit_and_room_was_clearly_better(
    all_loads: list[EngineLoad], num_prompt_tokens: int, rotation: int
) -> None:
    roomy = [msgspec.structs.replace(load, num_free_blocks=1000, credit=1) for load in all_loads]
    chosen = pick([candidate(str(i), load) for i, load in enumerate(roomy)], num_prompt_tokens, rotation=rotation)
    assert chosen is not None
    waits = predicted_waits_s(roomy, num_prompt_tokens)
    assert waits[int(chosen)] <= min(waits) * 1.05 + 0.001 + 1e-9


def test_fewer_queued_tokens_win() -> None:
    assert pick([candidate("busy", num_queued_tokens=5000), candidate("idle")], 100) == "idle"


def test_a_faster_worker_with_a_longer_queue_wins_when_it_is_done_earlier() -> None:
    fast = candidate("fast", num_queued_tokens=5000, prefill_tokens_per_s=100_000.0)
    assert pick([fast, candidate("slow", num_queued_tokens=1000)], 1000) == "fast"


def test_unmeasured_workers_are_ordered_by_what_is_queued() -> None:
    unmeasured = msgspec.structs.replace(IDLE, prefill_tokens_per_s=0.0, step_s=0.0)
    assert pick([candidate("a", unmeasured, num_queued_tokens=900), candidate("b", unmeasured)], 10) == "b"
    assert pick([candidate("a", unmeasured, num_waiting=2), candidate("b", unmeasured)], 10) == "b"


def test_a_new_worker_is_neither_shunned_nor_flooded() -> None:
    new = msgspec.structs.replace(IDLE, prefill_tokens_per_s=0.0, step_s=0.0)
    assert pick([candidate("known", num_queued_tokens=500), candidate("new", new)], 10) == "new"
    assert pick([candidate("known"), candidate("new", new, num_queued_tokens=500)], 10) == "known"


def test_equal_waits_go_to_the_fewest_running() -> None:
    assert pick([candidate("a", num_running=3), candidate("b", num_running=2)], 10) == "b"


def test_a_worker_without_free_blocks_is_the_last_choice_but_a_choice() -> None:
    full = candidate("full", num_free_blocks=1)
    assert pick([full, candidate("roomy", num_queued_tokens=90_000)], 100) == "roomy"
    assert pick([full], 100) == "full"


def test_rotation_spreads_equal_choices_evenly() -> None:
    candidates = [candidate(name) for name in "abc"]
    assert Counter(pick(candidates, 10, rotation=i) for i in range(300)) == {"a": 100, "b": 100, "c": 100}
