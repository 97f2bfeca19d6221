import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.core.config import convert
from headrace.core.errors import ConfigError, EngineDead
from headrace.core.frames import StepFrame
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import GenerationRequest, SamplingParams, StopConditions


def ask(name: str, prompt: list[int], max_tokens: int, sampling: SamplingParams | None = None) -> GenerationRequest:
    return GenerationRequest(
        SequenceId(name), TenantId("t"), prompt, StopConditions(max_tokens), sampling or SamplingParams()
    )


async def run(config: FakeConfig, *requests: GenerationRequest) -> tuple[dict[str, list[int]], list[StepFrame]]:
    """Tokens by sequence, and all frames."""
    engine = FakeEngine(config)
    for request in requests:
        engine.submit(request)
    frames: list[StepFrame] = []
    tokens: dict[str, list[int]] = {request.sequence_id: [] for request in requests}
    num_running = len(requests)
    async for frame in engine.frames():
        frames.append(frame)
        for delta in frame.deltas:
            tokens[delta.sequence_id] += delta.token_ids
            num_running -= delta.finish is not None
        if num_running == 0:
            break
    await engine.close()
    return tokens, frames


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=30),
    seed=st.integers(0, 2**63 - 1),
    cut=st.integers(1, 19),
    tokens_per_step=st.integers(1, 4),
)
def test_generation_goes_on_the_same_way_wherever_it_was_cut(
    prompt: list[int], seed: int, cut: int, tokens_per_step: int
) -> None:
    sampling = SamplingParams(seed=seed)
    config = FakeConfig(vocab_size=100)

    whole, _ = asyncio.run(run(config, ask("a", prompt, 20, sampling)))
    fast = msgspec.structs.replace(config, tokens_per_step=tokens_per_step)
    rest, _ = asyncio.run(run(fast, ask("b", prompt + whole["a"][:cut], 20 - cut, sampling)))

    assert rest["b"] == whole["a"][cut:]


async def test_only_the_given_ids_are_generated() -> None:
    tokens, _ = await run(FakeConfig(token_ids=(7, 300, 9)), ask("a", [1], 200))

    assert set(tokens["a"]) == {7, 300, 9}


async def test_any_token_of_the_prompt_changes_what_follows() -> None:
    prompt = list(range(100))
    changed = [[*prompt[:i], 500, *prompt[i + 1 :]] for i in range(0, 100, 9)]
    tokens, _ = await run(FakeConfig(), *(ask(f"{i}", p, 20) for i, p in enumerate([prompt, *changed])))

    assert len({tuple(value) for value in tokens.values()}) == len(tokens)


async def test_greedy_ignores_the_seed() -> None:
    tokens, _ = await run(
        FakeConfig(),
        *(ask(f"{seed}", [1], 20, SamplingParams(seed=seed, temperature=0.0)) for seed in range(3)),
    )

    assert len({tuple(value) for value in tokens.values()}) == 1


async def test_a_step_computes_no_more_prompt_than_its_budget() -> None:
    tokens, frames = await run(FakeConfig(max_num_batched_tokens=10), ask("a", [1] * 25, 2), ask("b", [1] * 8, 2))

    assert [sum(frame.service.values()) for frame in frames[:4]] == [10, 10, 10, 4]
    assert len(tokens["a"]) == len(tokens["b"]) == 2


async def test_sequences_wait_for_blocks_and_all_come_back() -> None:
    config = FakeConfig(max_model_len=64, block_size=16, num_blocks=4, max_num_seqs=8, max_waiting=8)
    tokens, frames = await run(config, *(ask(f"{i}", [1] * 16, 16) for i in range(6)))

    assert all(len(value) == 16 for value in tokens.values())
    assert max(frame.load.num_running for frame in frames) == 2
    assert frames[-1].load.num_free_blocks == 4


async def test_credit_shrinks_while_blocks_are_short() -> None:
    engine = FakeEngine(FakeConfig(max_model_len=64, num_blocks=4, max_num_seqs=8, max_waiting=3))
    for i in range(3):
        engine.submit(ask(f"{i}", [1] * 16, 48))
    async for _ in engine.frames():
        break

    assert engine.load().credit == 1
    await engine.close()


async def test_a_reader_who_is_slow_slows_the_engine() -> None:
    engine = FakeEngine()
    engine.submit(ask("a", [1], 4000))
    for _ in range(1000):
        await asyncio.sleep(0)

    assert (await engine.stats()).step < 100
    await engine.close()


async def test_it_dies_at_the_configured_step_after_what_was_finished_was_told() -> None:
    engine = FakeEngine(FakeConfig(die_at_step=4))
    engine.submit(ask("a", [1], 10))
    frames = engine.frames()

    assert [(await anext(frames)).step for _ in range(3)] == [1, 2, 3]
    with pytest.raises(EngineDead, match="step 4"):
        await anext(frames)


async def test_it_stalls_at_the_configured_step_until_resumed() -> None:
    engine = FakeEngine(FakeConfig(stall_at_step=3, stall_timeout_s=0.05))
    engine.submit(ask("a", [1], 5))
    frames = engine.frames()
    assert [(await anext(frames)).step for _ in range(2)] == [1, 2]
    stats = await engine.stats()
    async with asyncio.timeout(5):
        while stats.healthy:
            stats = await engine.stats()
            await asyncio.sleep(0.01)
    assert stats.step == 2
    assert stats.last_progress_age_s >= 0.05
    engine.resume()

    assert (await anext(frames)).step == 3
    assert (await engine.stats()).healthy
    await engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"max_waiting": -1},
        {"step_s": -0.1},
        {"tokens_per_step": 0},
        {"max_model_len": 100, "num_blocks": 6},
        {"token_ids": [5000]},
        {"token_ids": [-1]},
        {"first_token_id": 1024},
        {"max_num_seq": 3},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        convert(settings, FakeConfig, source="test")
