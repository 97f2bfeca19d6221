"""A deterministic engine without a model: for tests, and for load on everything above the engine.

The next token is a pure function of the seed (0 when greedy), the position and all tokens before it, so generation
that was resumed elsewhere goes on exactly as it would have. Temperature, penalties and bias do not change the choice.
"""

import asyncio
import zlib
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator

import msgspec

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import ContextLengthExceeded, Draining, EngineDead, InvalidRequest, Overloaded
from headrace.core.frames import (
    EngineDescription,
    EngineLoad,
    EngineStats,
    SequenceDelta,
    SequenceTiming,
    StepFrame,
    TokenLogprobs,
)
from headrace.core.ids import ModelName, SequenceId, TenantId, VersionId
from headrace.core.requests import FinishReason, GenerationRequest

_LOGPROB_STEP = 0.5
_MAX_UNREAD_FRAMES = 64
_NO_SEED = 0


class FakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the fake engine claims to be, how fast it is, and when it fails."""

    model: ModelName = ModelName("fake")
    """The name it says it serves; a worker process puts its own ``model`` here."""
    version: VersionId = VersionId("000000000000")
    """Likewise; a worker process puts the version that was resolved."""
    vocab_size: int = 1024
    """Prompts with ids from here on are refused."""
    token_ids: tuple[int, ...] = ()
    """What it chooses from; empty means ``[first_token_id, vocab_size)``. Give ids that decode to harmless text."""
    first_token_id: int = 16
    """The least id that it chooses when ``token_ids`` is empty."""
    max_model_len: int = 4096
    """Prompt and output tokens of a sequence together."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_waiting: int = 8
    """Sequences accepted beyond the running ones."""
    block_size: int = 16
    """Tokens that share a block of the KV cache it pretends to have."""
    num_blocks: int = 65536
    """Blocks of that cache; a sequence that finds none waits."""
    step_s: float = 0.0
    """Duration of one step."""
    tokens_per_step: int = 1
    """Tokens that a decoding sequence gets from one step, as if a speculation had been accepted."""
    max_num_batched_tokens: int = 8192
    """Prompt tokens computed in one step, over all sequences."""
    stall_timeout_s: float = 30.0
    """With work waiting and no step finished for so long, it reports itself unhealthy."""
    die_at_step: int | None = None
    """This step does not finish: :meth:`FakeEngine.frames` raises ``EngineDead`` instead."""
    stall_at_step: int | None = None
    """This step never finishes (until :meth:`FakeEngine.resume`)."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "block_size", "tokens_per_step", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_waiting < 0 or self.step_s < 0:
            raise ValueError("max_waiting and step_s must not be negative")
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but {self.num_blocks} blocks of {self.block_size} hold only "
                f"{self.num_blocks * self.block_size} tokens"
            )
        if any(not 0 <= token_id < self.vocab_size for token_id in self.choices()) or not self.choices():
            raise ValueError(f"token_ids must be a non-empty part of [0, {self.vocab_size})")

    def choices(self) -> tuple[int, ...]:
        """The token ids that are generated."""
        return self.token_ids or tuple(range(self.first_token_id, self.vocab_size))


class _Sequence:
    """A sequence in flight."""

    __slots__ = (
        "aborted",
        "digest",
        "first_step_at",
        "first_token_at",
        "num_blocks",
        "num_computed",
        "num_generated",
        "num_to_generate",
        "position",
        "request",
        "seed_bytes",
        "stop_token_ids",
        "submitted_at",
    )

    def __init__(self, request: GenerationRequest, config: FakeConfig, now: float) -> None:
        self.request = request
        num_prompt = len(request.prompt)
        self.num_to_generate = min(request.stop.max_tokens, config.max_model_len - num_prompt)
        self.num_blocks = -(-(num_prompt + self.num_to_generate) // config.block_size)
        self.stop_token_ids = frozenset(request.stop.stop_token_ids)
        # CRC-32 continues from a previous value, so the digest of "prompt, then one more token" costs one short call.
        self.digest = zlib.crc32(array("I", request.prompt).tobytes())
        seed = _NO_SEED if request.sampling.greedy else request.sampling.seed
        self.seed_bytes = seed.to_bytes(8, "little")
        self.position = num_prompt
        self.num_computed = 0
        self.num_generated = 0
        self.aborted = False
        self.submitted_at = now
        self.first_step_at: float | None = None
        self.first_token_at: float | None = None

    def timing(self, now: float) -> SequenceTiming:
        first_step = now if self.first_step_at is None else self.first_step_at
        first_token = now if self.first_token_at is None else self.first_token_at
        return SequenceTiming(
            wait_s=first_step - self.submitted_at,
            prefill_s=first_token - first_step,
            decode_s=now - first_token,
            num_cached_tokens=0,
            num_preemptions=0,
        )


class FakeEngine:
    """Implements :class:`headrace.ports.engine.Engine` on the event loop alone."""

    def __init__(self, config: FakeConfig | None = None, clock: Clock | None = None) -> None:
        self._config = config or FakeConfig()
        self._clock = clock or SystemClock()
        self._choices = self._config.choices()
        self._running: dict[SequenceId, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._in_flight: dict[SequenceId, _Sequence] = {}
        self._num_free_blocks = self._config.num_blocks
        self._blocks_short = False
        self._step = 0
        self._step_started_at: float | None = None
        self._draining = False
        self._closed = False
        self._dead: EngineDead | None = None
        self._task: asyncio.Task[None] | None = None
        self._frames: asyncio.Queue[StepFrame | None] = asyncio.Queue(_MAX_UNREAD_FRAMES)
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._gate = asyncio.Event()
        self._gate.set()
        self._num_finished: Counter[str] = Counter()
        self._num_queued_tokens = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    # --- the Engine port ---------------------------------------------------------------------------------------------

    def describe(self) -> EngineDescription:
        config = self._config
        return EngineDescription(
            model=config.model,
            version=config.version,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            dtype="none",
            device="fake",
        )

    def load(self) -> EngineLoad:
        step_s = self._config.step_s
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_queued_tokens=self._num_queued_tokens,
            num_free_blocks=self._num_free_blocks,
            num_blocks=self._config.num_blocks,
            credit=self._credit(),
            prefill_tokens_per_s=self._config.max_num_batched_tokens / step_s if step_s else 0.0,
            step_s=step_s,
        )

    def submit(self, request: GenerationRequest) -> None:
        self._refuse_if_gone()
        if self._draining:
            raise Draining("the engine is draining and takes no new sequences")
        self._check(request)
        if self._credit() <= 0:
            raise Overloaded(
                f"{len(self._running)} sequences run and {len(self._waiting)} wait; the engine takes no more now"
            )
        sequence = _Sequence(request, self._config, self._clock.monotonic())
        self._in_flight[request.sequence_id] = sequence
        self._waiting.append(sequence)
        self._num_queued_tokens += len(request.prompt)
        self._idle.clear()
        self._work.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="fake-engine")

    def abort(self, sequence_id: SequenceId) -> None:
        sequence = self._in_flight.get(sequence_id)
        if sequence is not None:
            sequence.aborted = True

    async def frames(self) -> AsyncIterator[StepFrame]:
        while True:
            if self._frames.empty() and (self._dead is not None or self._closed):
                break
            frame = await self._frames.get()
            if frame is not None:
                yield frame
        if self._dead is not None:
            raise self._dead

    async def stats(self) -> EngineStats:
        self._refuse_if_gone()
        started = self._step_started_at
        age = 0.0 if started is None else self._clock.monotonic() - started
        return EngineStats(
            load=self.load(),
            step=self._step,
            last_progress_age_s=age,
            healthy=age < self._config.stall_timeout_s,
            draining=self._draining,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=0,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=0,
            num_finished=dict(self._num_finished),
            num_prefix_queries=self._num_prompt_tokens,
            blocks_in_use=self._config.num_blocks - self._num_free_blocks,
        )

    async def drain(self) -> None:
        self._draining = True
        if self._dead is None and not self._closed:
            await self._idle.wait()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._wake_everyone()

    # --- failure injection -------------------------------------------------------------------------------------------

    def kill(self, reason: str = "the fake engine was told to die") -> None:
        """Die now, as if the device had failed: sequences in flight are lost."""
        if self._dead is None and not self._closed:
            self._dead = EngineDead(reason)
            if self._task is not None:
                self._task.cancel()
            self._wake_everyone()

    def stall(self) -> None:
        """From the next step on, no step finishes until :meth:`resume`."""
        self._gate.clear()

    def resume(self) -> None:
        """End a stall."""
        self._gate.set()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _refuse_if_gone(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._closed:
            raise EngineDead("the engine was closed")

    def _check(self, request: GenerationRequest) -> None:
        config = self._config
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed", param="prompt")
        if len(request.prompt) >= config.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens; with at least one to generate the model takes at most "
                f"{config.max_model_len}",
                param="prompt",
            )
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= config.vocab_size:
            raise InvalidRequest(
                f"token id {low if low < 0 else high} is outside the vocabulary of {config.vocab_size}", param="prompt"
            )
        if request.stop.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {request.stop.max_tokens}; it must be at least 1", param="max_tokens")
        request.sampling.check()
        if request.sequence_id in self._in_flight:
            raise InvalidRequest(f"sequence {request.sequence_id} is already in flight", param="sequence_id")

    def _credit(self) -> int:
        if self._dead is not None or self._closed or self._draining:
            return 0
        num_startable = 0 if self._blocks_short else self._config.max_num_seqs - len(self._running)
        return max(0, num_startable + self._config.max_waiting - len(self._waiting))

    def _wake_everyone(self) -> None:
        self._in_flight.clear()
        self._running.clear()
        self._waiting.clear()
        self._num_queued_tokens = 0
        self._num_free_blocks = self._config.num_blocks
        self._idle.set()
        # A consumer that waits on an empty queue needs a nudge; one that is behind looks for itself.
        if self._frames.empty():
            self._frames.put_nowait(None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._in_flight:
                self._step_started_at = None
                self._idle.set()
                self._work.clear()
                await self._work.wait()
            self._step_started_at = self._clock.monotonic()
            next_step = self._step + 1
            if next_step == self._config.die_at_step:
                self._task = None
                self.kill(f"the fake engine was configured to die at step {next_step}")
                return
            if next_step == self._config.stall_at_step:
                self.stall()
            until = loop.time() + self._config.step_s
            self._admit()
            await self._gate.wait()
            await asyncio.sleep(max(0.0, until - loop.time()))
            await self._frames.put(self._compute())

    def _admit(self) -> None:
        """Start waiting sequences in order while slots and blocks last; all blocks a sequence may need, at once."""
        self._blocks_short = False
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            head = self._waiting[0]
            if head.num_blocks > self._num_free_blocks and not head.aborted:
                self._blocks_short = True
                return
            self._waiting.popleft()
            if head.aborted:
                head.num_blocks = 0
            self._num_free_blocks -= head.num_blocks
            self._running[head.request.sequence_id] = head

    def _compute(self) -> StepFrame:
        """One step: finish what was aborted, spend the prompt budget in order, give every decoding sequence tokens."""
        self._step += 1
        now = self._clock.monotonic()
        budget = self._config.max_num_batched_tokens
        deltas: list[SequenceDelta] = []
        service: dict[TenantId, int] = {}
        for sequence in [s for s in self._waiting if s.aborted]:
            self._waiting.remove(sequence)
            deltas.append(self._finish(sequence, [], [], FinishReason.ABORT, now))
        for sequence in list(self._running.values()):
            if sequence.aborted:
                deltas.append(self._finish(sequence, [], [], FinishReason.ABORT, now))
                continue
            num_computed = 1
            if sequence.first_token_at is None:
                num_computed = min(budget, len(sequence.request.prompt) - sequence.num_computed)
                if num_computed == 0:
                    continue
                if sequence.first_step_at is None:
                    sequence.first_step_at = now
                budget -= num_computed
                sequence.num_computed += num_computed
                self._num_prompt_tokens += num_computed
                self._num_queued_tokens -= num_computed
            if sequence.num_computed == len(sequence.request.prompt):
                deltas.append(self._decode(sequence, now))
            tenant = sequence.request.tenant_id
            service[tenant] = service.get(tenant, 0) + num_computed
        return StepFrame(step=self._step, deltas=deltas, load=self.load(), service=service)

    def _decode(self, sequence: _Sequence, now: float) -> SequenceDelta:
        request = sequence.request
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        finish: FinishReason | None = None
        num_tokens = 1 if sequence.first_token_at is None else self._config.tokens_per_step
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        for _ in range(num_tokens):
            token_id = self._next_token(sequence)
            token_ids.append(token_id)
            if request.sampling.logprobs is not None:
                logprobs.append(self._logprobs(token_id, request.sampling.logprobs))
            if token_id in sequence.stop_token_ids:
                finish = FinishReason.STOP
                break
            if sequence.num_generated == sequence.num_to_generate:
                finish = FinishReason.LENGTH
                break
        self._num_generated_tokens += len(token_ids)
        if finish is not None:
            return self._finish(sequence, token_ids, logprobs, finish, now)
        return SequenceDelta(request.sequence_id, token_ids, logprobs)

    def _next_token(self, sequence: _Sequence) -> int:
        choices = self._choices
        point = zlib.crc32(sequence.position.to_bytes(4, "little") + sequence.seed_bytes, sequence.digest)
        token_id = choices[point % len(choices)]
        if token_id in sequence.stop_token_ids and sequence.num_generated < sequence.request.stop.min_tokens:
            allowed = [t for t in choices if t not in sequence.stop_token_ids]
            token_id = allowed[point % len(allowed)] if allowed else token_id
        sequence.digest = zlib.crc32(token_id.to_bytes(4, "little"), sequence.digest)
        sequence.position += 1
        sequence.num_generated += 1
        return token_id

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """The chosen token is always the likeliest; the alternatives are its neighbours in the vocabulary."""
        top = [((token_id + i) % self._config.vocab_size, -_LOGPROB_STEP * (i + 1)) for i in range(num_top)]
        return TokenLogprobs(token_id=token_id, logprob=-_LOGPROB_STEP, rank=1, top=top)

    def _finish(
        self,
        sequence: _Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: FinishReason,
        now: float,
    ) -> SequenceDelta:
        sequence_id = sequence.request.sequence_id
        del self._in_flight[sequence_id]
        self._num_queued_tokens -= len(sequence.request.prompt) - sequence.num_computed
        if self._running.pop(sequence_id, None) is not None:
            self._num_free_blocks += sequence.num_blocks
        self._num_finished[finish.value] += 1
        return SequenceDelta(sequence_id, token_ids, logprobs, finish=finish, timing=sequence.timing(now))
