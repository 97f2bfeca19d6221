"""What every engine does, near or far, real or fake: the behaviour that ``headrace.ports.engine`` promises."""

import asyncio
import contextlib
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.adapters.engine.remote import connect
from headrace.adapters.engine.tls import client_context, server_context
from headrace.apps.pki import ensure_authority, ensure_certificate
from headrace.core.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    Overloaded,
    Unavailable,
    from_code,
)
from headrace.core.frames import SequenceDelta, StepFrame
from headrace.core.ids import SequenceId, TenantId, VersionId
from headrace.core.requests import FinishReason, GenerationRequest, SamplingParams, StopConditions
from headrace.engine.build import build
from headrace.engine.config import EngineConfig
from headrace.ports.engine import Engine
from headrace.worker.config import WorkerConfig
from headrace.worker.service import WorkerService

MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 8
MAX_WAITING = 4
DEADLINE_S = 20.0


@dataclass
class Rig:
    """An engine under test, and how to make it die, as a failing device would."""

    engine: Engine
    kill: Callable[[], None]


@dataclass
class Parts:
    """What rigs are built from, made once."""

    certificates: Path
    model_dir: Path


MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]


@asynccontextmanager
async def fake_rig(parts: Parts, *, step_s: float = 0.0) -> AsyncIterator[Rig]:
    engine = FakeEngine(fake_config(step_s))
    yield Rig(engine, engine.kill)
    await engine.close()


@asynccontextmanager
async def remote_rig(parts: Parts, *, step_s: float = 0.0) -> AsyncIterator[Rig]:
    """A fake engine behind a worker service, reached over TCP with mutual TLS."""
    fake = FakeEngine(fake_config(step_s))
    worker = WorkerService(
        fake,
        WorkerConfig(listen="127.0.0.1:0", http_listen=None, heartbeat_s=0.1),
        server_context(ensure_certificate(parts.certificates, "worker")),
        on_stuck=pytest.fail,
    )
    await worker.start()
    engine = await connect(str(worker.address), client_context(ensure_certificate(parts.certificates, "gateway")))
    yield Rig(engine, fake.kill)
    await engine.close()
    await worker.close()


def fake_config(step_s: float) -> FakeConfig:
    return FakeConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_waiting=MAX_WAITING,
        num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // 16,
        max_num_batched_tokens=64,
        step_s=step_s,
    )


@asynccontextmanager
async def native_rig(parts: Parts, *, step_s: float = 0.0) -> AsyncIterator[Rig]:
    """Our own engine with a tiny random model on the CPU."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_waiting=MAX_WAITING,
        max_num_batched_tokens=64,
        kv_cache_bytes=1024 * 1024,
        num_threads=1,
    )
    engine = await asyncio.to_thread(build, parts.model_dir, "tiny", VersionId("0" * 12), config)
    core = engine._core
    step = core.step

    def slow_step() -> StepFrame:
        time.sleep(step_s)
        return step()

    def failing_step() -> StepFrame:
        raise RuntimeError("the device failed")

    def kill() -> None:
        core.step = failing_step
        with contextlib.suppress(Unavailable):
            engine.submit(ask("wakes the engine"))

    if step_s:
        core.step = slow_step
    yield Rig(engine, kill)
    await engine.close()


def write_tiny_model(directory: Path) -> None:
    """A random decoder of two layers, in the layout of a published Llama."""
    hidden, layers, heads, kv_heads, head_dim, mlp, vocab = 32, 2, 4, 2, 8, 64, 128
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": (mlp, hidden),
            prefix + "mlp.up_proj.weight": (mlp, hidden),
            prefix + "mlp.down_proj.weight": (hidden, mlp),
        }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    norms = ["model.norm.weight"]
    for layer in range(layers):
        norms += [f"model.layers.{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    tensors |= {name: torch.ones(hidden) for name in norms}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


RIGS: dict[str, Callable[..., AbstractAsyncContextManager[Rig]]] = {
    "fake": fake_rig,
    "remote": remote_rig,
    "native": native_rig,
}


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    made = Parts(tmp_path_factory.mktemp("certificates"), tmp_path_factory.mktemp("model"))
    ensure_authority(made.certificates)
    write_tiny_model(made.model_dir)
    return made


@pytest.fixture(params=RIGS)
def make_rig(request: pytest.FixtureRequest, parts: Parts) -> MakeRig:
    return lambda **options: RIGS[request.param](parts, **options)


@pytest.fixture
async def rig(make_rig: MakeRig) -> AsyncIterator[Rig]:
    async with make_rig() as made:
        yield made


class Watcher:
    """Consumes an engine's frames, and remembers what was said of each sequence."""

    def __init__(self, engine: Engine) -> None:
        self.frames: list[StepFrame] = []
        self.deltas: dict[str, list[SequenceDelta]] = defaultdict(list)
        self.finish_step: dict[str, int] = {}
        self.error: BaseException | None = None
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._consume(engine))

    async def _consume(self, engine: Engine) -> None:
        try:
            async for frame in engine.frames():
                self.frames.append(frame)
                for delta in frame.deltas:
                    self.deltas[delta.sequence_id].append(delta)
                    if delta.finish is not None:
                        self.finish_step.setdefault(delta.sequence_id, frame.step)
                await self._notify()
        except EngineDead as error:
            self.error = error
        await self._notify()

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(condition)

    async def finished(self, *sequence_ids: str) -> None:
        await self.until(lambda: all(sequence_id in self.finish_step for sequence_id in sequence_ids))

    async def ended(self) -> None:
        """The frames have ended, or raised; see ``error``."""
        await asyncio.wait_for(self._task, DEADLINE_S)

    def tokens(self, sequence_id: str) -> list[int]:
        return [token_id for delta in self.deltas[sequence_id] for token_id in delta.token_ids]

    def finish(self, sequence_id: str) -> FinishReason | None:
        return self.deltas[sequence_id][-1].finish


@pytest.fixture
async def watcher(rig: Rig) -> AsyncIterator[Watcher]:
    watching = Watcher(rig.engine)
    yield watching
    await rig.engine.close()
    await watching.ended()


def ask(
    name: str,
    prompt: Sequence[int] = (20, 21, 22),
    max_tokens: int = 8,
    *,
    tenant: str = "tenant",
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
    sampling: SamplingParams | None = None,
    num_resumed: int = 0,
) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=SequenceId(name),
        tenant_id=TenantId(tenant),
        prompt=list(prompt),
        stop=StopConditions(max_tokens=max_tokens, stop_token_ids=stop, min_tokens=min_tokens),
        sampling=sampling or SamplingParams(temperature=0.0),
        num_resumed_tokens=num_resumed,
    )


def random_requests(num: int, seed: int) -> list[GenerationRequest]:
    rng = random.Random(seed)
    return [
        ask(
            f"r{index}",
            [rng.randrange(16, 60) for _ in range(rng.randrange(1, 150))],
            rng.randrange(1, 40),
            tenant=rng.choice(["a", "b"]),
            sampling=SamplingParams(seed=rng.randrange(2**63), temperature=rng.choice([0.0, 1.0])),
        )
        for index in range(num)
    ]


async def run_all(engine: Engine, watcher: Watcher, requests: Sequence[GenerationRequest]) -> None:
    """Submit as credit allows, and wait for all of them."""
    for request in requests:
        await watcher.until(lambda: engine.load().credit > 0 or watcher.error is not None)
        engine.submit(request)
    await watcher.finished(*(request.sequence_id for request in requests))


async def test_describes_itself_the_same_way_always(rig: Rig) -> None:
    description = rig.engine.describe()

    assert description.max_model_len == MAX_MODEL_LEN
    assert description.max_num_seqs == MAX_NUM_SEQS
    assert description.vocab_size > 60
    assert rig.engine.describe() == description


async def test_every_accepted_sequence_ends_with_exactly_one_finish(rig: Rig, watcher: Watcher) -> None:
    requests = random_requests(60, seed=1)

    await run_all(rig.engine, watcher, requests)

    for request in requests:
        deltas = watcher.deltas[request.sequence_id]
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_only_sequences_that_were_submitted_are_spoken_of(rig: Rig, watcher: Watcher) -> None:
    requests = random_requests(20, seed=2)

    await run_all(rig.engine, watcher, requests)

    assert set(watcher.deltas) == {request.sequence_id for request in requests}


async def test_tokens_do_not_depend_on_company(make_rig: MakeRig) -> None:
    requests = random_requests(12, seed=3)
    async with make_rig() as together:
        crowd = Watcher(together.engine)
        await run_all(together.engine, crowd, requests)
    async with make_rig() as alone:
        single = Watcher(alone.engine)
        for request in requests:
            await run_all(alone.engine, single, [request])

    for request in requests:
        assert crowd.tokens(request.sequence_id) == single.tokens(request.sequence_id)


async def test_sampling_follows_the_seed(rig: Rig, watcher: Watcher) -> None:
    def seeded(name: str, seed: int) -> GenerationRequest:
        return ask(name, max_tokens=24, sampling=SamplingParams(seed=seed))

    await run_all(rig.engine, watcher, [seeded("one", 7), seeded("same", 7), seeded("other", 8)])

    assert watcher.tokens("one") == watcher.tokens("same")
    assert watcher.tokens("one") != watcher.tokens("other")


@pytest.mark.parametrize("max_tokens", [1, 2, 33])
async def test_max_tokens_ends_a_sequence_with_length(rig: Rig, watcher: Watcher, max_tokens: int) -> None:
    await run_all(rig.engine, watcher, [ask("a", max_tokens=max_tokens)])

    assert watcher.finish("a") is FinishReason.LENGTH
    assert len(watcher.tokens("a")) == max_tokens


async def test_the_context_length_ends_a_sequence_with_length(rig: Rig, watcher: Watcher) -> None:
    await run_all(rig.engine, watcher, [ask("a", [20] * (MAX_MODEL_LEN - 5), max_tokens=100)])

    assert watcher.finish("a") is FinishReason.LENGTH
    assert len(watcher.tokens("a")) == 5


async def test_a_stop_token_ends_a_sequence_and_is_its_last(rig: Rig, watcher: Watcher) -> None:
    sampling = SamplingParams(seed=11)
    await run_all(rig.engine, watcher, [ask("free", max_tokens=24, sampling=sampling)])
    free = watcher.tokens("free")
    stop = free[10]

    await run_all(rig.engine, watcher, [ask("stopped", max_tokens=24, sampling=sampling, stop=(stop,))])

    assert watcher.finish("stopped") is FinishReason.STOP
    assert watcher.tokens("stopped") == free[: free.index(stop) + 1]


async def test_min_tokens_keeps_stop_tokens_away(rig: Rig, watcher: Watcher) -> None:
    sampling = SamplingParams(seed=12)
    await run_all(rig.engine, watcher, [ask("free", max_tokens=1, sampling=sampling)])
    stop = watcher.tokens("free")[0]

    await run_all(rig.engine, watcher, [ask("a", max_tokens=12, sampling=sampling, stop=(stop,), min_tokens=9)])

    tokens = watcher.tokens("a")
    assert stop not in tokens[:9]
    assert len(tokens) >= 9


async def test_a_resumed_generation_goes_on_with_the_same_tokens(rig: Rig, watcher: Watcher) -> None:
    prompt, sampling = [30, 31, 32, 33], SamplingParams(seed=99)
    await run_all(rig.engine, watcher, [ask("whole", prompt, 30, sampling=sampling)])
    whole = watcher.tokens("whole")

    for num_emitted in (1, 12, 29):
        name = f"resumed after {num_emitted}"
        rest = ask(name, [*prompt, *whole[:num_emitted]], 30 - num_emitted, sampling=sampling, num_resumed=num_emitted)
        await run_all(rig.engine, watcher, [rest])
        assert watcher.tokens(name) == whole[num_emitted:]


@pytest.mark.parametrize("num_top", [None, 0, 3])
async def test_logprobs_have_the_shape_that_was_asked_for(rig: Rig, watcher: Watcher, num_top: int | None) -> None:
    await run_all(rig.engine, watcher, [ask("a", sampling=SamplingParams(temperature=0.0, logprobs=num_top))])

    for delta in watcher.deltas["a"]:
        if num_top is None:
            assert delta.logprobs == []
            continue
        assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        for entry in delta.logprobs:
            assert len(entry.top) == num_top
            assert entry.logprob <= 0.0
            assert entry.rank >= 1
            likely = [logprob for _, logprob in entry.top]
            assert likely == sorted(likely, reverse=True)


async def test_the_last_delta_says_where_the_time_went(rig: Rig, watcher: Watcher) -> None:
    await run_all(rig.engine, watcher, [ask("a")])

    timing = watcher.deltas["a"][-1].timing
    assert timing is not None
    assert min(timing.wait_s, timing.prefill_s, timing.decode_s) >= 0.0
    assert all(delta.timing is None for delta in watcher.deltas["a"][:-1])


async def test_steps_never_go_back(rig: Rig, watcher: Watcher) -> None:
    await run_all(rig.engine, watcher, random_requests(20, seed=4))

    steps = [frame.step for frame in watcher.frames]
    assert steps == sorted(steps)
    assert steps[-1] > 0


async def test_service_is_accounted_to_tenants(rig: Rig, watcher: Watcher) -> None:
    requests = random_requests(20, seed=5)
    await run_all(rig.engine, watcher, requests)

    served: dict[str, int] = defaultdict(int)
    for frame in watcher.frames:
        for tenant, num_tokens in frame.service.items():
            served[tenant] += num_tokens
    for tenant in ("a", "b"):
        theirs = [request for request in requests if request.tenant_id == tenant]
        num_prompt = sum(len(request.prompt) for request in theirs)
        num_generated = sum(len(watcher.tokens(request.sequence_id)) for request in theirs)
        assert num_generated - len(theirs) < served[tenant] <= num_prompt + num_generated


async def test_an_aborted_sequence_ends_within_two_steps(make_rig: MakeRig) -> None:
    async with make_rig(step_s=0.02) as rig:
        watcher = Watcher(rig.engine)
        rig.engine.submit(ask("a", max_tokens=200))
        rig.engine.submit(ask("b", max_tokens=200))
        await watcher.until(lambda: len(watcher.tokens("a")) >= 3)

        rig.engine.abort(SequenceId("a"))
        step = watcher.frames[-1].step
        await watcher.finished("a")

        assert watcher.finish("a") is FinishReason.ABORT
        assert watcher.finish_step["a"] <= step + 2
        assert "b" not in watcher.finish_step


async def test_a_sequence_is_aborted_before_its_first_step(rig: Rig, watcher: Watcher) -> None:
    rig.engine.submit(ask("a", max_tokens=200))
    rig.engine.abort(SequenceId("a"))
    await watcher.finished("a")

    assert watcher.finish("a") is FinishReason.ABORT


async def test_a_waiting_sequence_is_aborted(make_rig: MakeRig) -> None:
    async with make_rig(step_s=0.01) as rig:
        watcher = Watcher(rig.engine)
        names = [f"s{i}" for i in range(MAX_NUM_SEQS + MAX_WAITING)]
        for name in names:
            rig.engine.submit(ask(name, max_tokens=100))
        rig.engine.abort(SequenceId(names[-1]))
        await watcher.finished(names[-1])

        assert watcher.finish(names[-1]) is FinishReason.ABORT
        assert watcher.tokens(names[-1]) == []
        assert not any(name in watcher.finish_step for name in names[:-1])


async def test_aborting_what_is_unknown_finished_or_aborted_changes_nothing(rig: Rig, watcher: Watcher) -> None:
    rig.engine.abort(SequenceId("never heard of"))
    await run_all(rig.engine, watcher, [ask("done")])
    rig.engine.abort(SequenceId("done"))
    rig.engine.submit(ask("twice", max_tokens=200))
    rig.engine.abort(SequenceId("twice"))
    rig.engine.abort(SequenceId("twice"))
    await run_all(rig.engine, watcher, [ask("after")])

    assert len([d for d in watcher.deltas["done"] if d.finish is not None]) == 1
    assert [d.finish for d in watcher.deltas["twice"] if d.finish is not None] == [FinishReason.ABORT]
    assert "never heard of" not in watcher.deltas


async def test_a_finished_sequence_id_may_be_used_again(rig: Rig, watcher: Watcher) -> None:
    await run_all(rig.engine, watcher, [ask("a")])
    first = watcher.tokens("a")
    watcher.finish_step.clear()

    await run_all(rig.engine, watcher, [ask("a")])

    assert watcher.tokens("a") == first * 2


async def test_without_credit_nothing_is_taken(make_rig: MakeRig) -> None:
    async with make_rig(step_s=0.005) as rig:
        watcher = Watcher(rig.engine)
        accepted = [f"s{i}" for i in range(rig.engine.load().credit)]
        for name in accepted:
            rig.engine.submit(ask(name))
        refused = f"s{len(accepted)}"
        with pytest.raises(Overloaded):
            rig.engine.submit(ask(refused))
        await watcher.finished(*accepted)
        assert refused not in watcher.deltas

        await run_all(rig.engine, watcher, [ask(refused)])
        assert watcher.finish(refused) is FinishReason.LENGTH


async def test_credit_is_exact(make_rig: MakeRig) -> None:
    async with make_rig(step_s=0.005) as rig:
        watcher = Watcher(rig.engine)
        full = rig.engine.load().credit
        assert full >= MAX_NUM_SEQS
        for num_submitted in range(full):
            assert rig.engine.load().credit == full - num_submitted
            rig.engine.submit(ask(f"s{num_submitted}"))
        assert rig.engine.load().credit == 0
        await watcher.finished(*(f"s{i}" for i in range(full)))

        await watcher.until(lambda: rig.engine.load().credit == full)
        load = rig.engine.load()
        assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 0, 0)


INVALID = {
    "empty prompt": ask("bad", []),
    "prompt longer than the context": ask("bad", [20] * (MAX_MODEL_LEN + 1)),
    "prompt that leaves no room for a token": ask("bad", [20] * MAX_MODEL_LEN),
    "token beyond the vocabulary": ask("bad", [20, 10_000_000]),
    "negative token": ask("bad", [20, -1]),
    "no tokens to generate": ask("bad", max_tokens=0),
    "temperature out of range": ask("bad", sampling=SamplingParams(temperature=9.0)),
    "not a number": ask("bad", sampling=SamplingParams(top_p=float("nan"))),
}


@pytest.mark.parametrize("case", INVALID)
async def test_what_can_never_be_served_is_refused_and_harms_nobody(rig: Rig, watcher: Watcher, case: str) -> None:
    rig.engine.submit(ask("good", max_tokens=20))
    try:
        rig.engine.submit(INVALID[case])
    except InvalidRequest:
        assert "bad" not in watcher.deltas
    else:
        await watcher.finished("bad")
        (delta,) = watcher.deltas["bad"]
        assert delta.finish is FinishReason.ERROR
        assert delta.token_ids == []
        assert delta.error
        assert isinstance(from_code(delta.error_code, delta.error), InvalidRequest)
    await watcher.finished("good")

    assert watcher.finish("good") is FinishReason.LENGTH


async def test_a_prompt_that_is_too_long_is_refused_as_such(rig: Rig, watcher: Watcher) -> None:
    with pytest.raises(ContextLengthExceeded, match=str(MAX_MODEL_LEN)):
        rig.engine.submit(ask("bad", [20] * (MAX_MODEL_LEN + 1)))


async def test_a_sequence_id_in_flight_is_refused(rig: Rig, watcher: Watcher) -> None:
    rig.engine.submit(ask("a", max_tokens=30))
    with pytest.raises(InvalidRequest):
        rig.engine.submit(ask("a", max_tokens=3))
    await watcher.finished("a")

    assert len(watcher.tokens("a")) == 30


async def test_drain_lets_the_present_finish_and_refuses_the_new(make_rig: MakeRig) -> None:
    async with make_rig(step_s=0.002) as rig:
        watcher = Watcher(rig.engine)
        names = [f"s{i}" for i in range(MAX_NUM_SEQS)]
        for name in names:
            rig.engine.submit(ask(name, max_tokens=20))
        await watcher.until(lambda: len(watcher.tokens("s0")) > 0)
        drained = asyncio.create_task(rig.engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            rig.engine.submit(ask("late"))
        assert rig.engine.load().credit == 0
        await asyncio.wait_for(drained, DEADLINE_S)
        await watcher.finished(*names)

        assert {watcher.finish(name) for name in names} == {FinishReason.LENGTH}
        assert "late" not in watcher.deltas
        await asyncio.wait_for(rig.engine.drain(), DEADLINE_S)
        with pytest.raises(Draining):
            rig.engine.submit(ask("later"))
        await rig.engine.close()
        await watcher.ended()
        assert watcher.error is None


async def test_an_idle_engine_drains_at_once(rig: Rig, watcher: Watcher) -> None:
    await asyncio.wait_for(rig.engine.drain(), DEADLINE_S)


async def test_close_ends_the_frames(rig: Rig) -> None:
    watcher = Watcher(rig.engine)
    rig.engine.submit(ask("a", max_tokens=200))
    await watcher.until(lambda: len(watcher.tokens("a")) > 0)
    await rig.engine.close()
    await watcher.ended()

    assert watcher.error is None
    await rig.engine.close()
    with pytest.raises(EngineDead):
        rig.engine.submit(ask("b"))
    rig.engine.abort(SequenceId("a"))


async def test_an_idle_engine_closes(rig: Rig) -> None:
    watcher = Watcher(rig.engine)
    await rig.engine.close()
    await watcher.ended()

    assert watcher.error is None


async def test_stats_answer_while_the_engine_is_busy_and_add_up(make_rig: MakeRig) -> None:
    async with make_rig(step_s=0.002) as rig:
        watcher = Watcher(rig.engine)
        requests = random_requests(6, seed=6)
        for request in requests:
            rig.engine.submit(request)
        await watcher.until(lambda: len(watcher.frames) > 0)
        busy = await asyncio.wait_for(rig.engine.stats(), DEADLINE_S)
        assert busy.healthy
        assert busy.load.num_running + busy.load.num_waiting > 0
        await watcher.finished(*(request.sequence_id for request in requests))
        idle = await asyncio.wait_for(rig.engine.stats(), DEADLINE_S)

        assert idle.num_generated_tokens == sum(len(watcher.tokens(r.sequence_id)) for r in requests)
        assert idle.num_prompt_tokens == sum(len(r.prompt) for r in requests)
        assert sum(idle.num_finished.values()) == len(requests)
        assert (idle.load.num_running, idle.load.num_waiting) == (0, 0)
        assert idle.step >= busy.step
        assert idle.healthy
        assert not idle.draining


async def test_many_sequences_come_and_go(rig: Rig, watcher: Watcher) -> None:
    rng = random.Random(7)
    requests = [ask(f"s{i}", [20 + i % 30], max_tokens=1 + i % 9) for i in range(300)]
    for request in requests:
        await watcher.until(lambda: rig.engine.load().credit > 0)
        rig.engine.submit(request)
        if rng.random() < 0.2:
            rig.engine.abort(request.sequence_id)
    await watcher.finished(*(request.sequence_id for request in requests))

    for request in requests:
        deltas = watcher.deltas[request.sequence_id]
        assert sum(delta.finish is not None for delta in deltas) == 1
        if watcher.finish(request.sequence_id) is FinishReason.LENGTH:
            assert len(watcher.tokens(request.sequence_id)) == request.stop.max_tokens


async def test_after_its_death_an_engine_says_so_everywhere(rig: Rig) -> None:
    watcher = Watcher(rig.engine)
    rig.engine.submit(ask("a", max_tokens=200))
    await watcher.until(lambda: len(watcher.tokens("a")) > 0)
    rig.kill()
    await watcher.ended()

    assert isinstance(watcher.error, EngineDead)
    with pytest.raises(EngineDead):
        rig.engine.submit(ask("b"))
    with contextlib.suppress(EngineDead):
        assert not (await asyncio.wait_for(rig.engine.stats(), DEADLINE_S)).healthy
    assert rig.engine.load().credit == 0
    rig.engine.abort(SequenceId("a"))
    await asyncio.wait_for(rig.engine.drain(), DEADLINE_S)


async def test_an_idle_engine_can_die_too(rig: Rig) -> None:
    watcher = Watcher(rig.engine)
    rig.kill()
    await watcher.ended()

    assert isinstance(watcher.error, EngineDead)
