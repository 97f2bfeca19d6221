"""From a parsed request to its tokens' text: one sequence for each choice, each finishing on its own.

Three tasks serve a request, however many tokens it makes: the handler, which watches the deadline and keeps the stream
alive; the generation (with one more task for each choice if there are several), which wakes once for each frame that
has tokens for it; and one that notices when the client leaves.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from headrace.core.errors import ClientGone, DeadlineExceeded, EngineDead, HeadraceError, from_code
from headrace.core.frames import EngineDescription, SequenceDelta, SequenceTiming, TokenLogprobs
from headrace.core.ids import ModelName, VersionId
from headrace.core.requests import FinishReason, GenerationRequest
from headrace.gateway.call import Call
from headrace.gateway.metrics import TokenGaps
from headrace.gateway.models import ServedModel
from headrace.prompts.text import TextStream


class StreamBreakdown(Protocol):
    """What the dispatcher measured for one sequence, in seconds."""

    @property
    def queue_s(self) -> float | None: ...
    @property
    def dispatch_s(self) -> float | None: ...


class TokenStream(Protocol):
    """One sequence's deltas as they come. Raises ``HeadraceError`` when there will be no more of them."""

    @property
    def breakdown(self) -> StreamBreakdown: ...
    @property
    def num_unread(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[SequenceDelta]: ...


class Dispatch(Protocol):
    """The part of the dispatcher that the gateway uses."""

    def stream(
        self, request: GenerationRequest, model: ModelName, version: VersionId | None
    ) -> AbstractAsyncContextManager[TokenStream]: ...

    def served(self) -> list[EngineDescription]: ...
    def on_change(self, listener: Callable[[], None]) -> None: ...


class Sink(Protocol):
    """Where the text of a request goes."""

    async def begin(self) -> None:
        """The request was accepted; may be called several times."""
        ...

    async def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> None:
        """New text of a choice, with the log-probabilities of its tokens if they were asked for."""
        ...

    async def last(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str) -> None:
        """The end of a choice, with what was held back."""
        ...


class Choice(msgspec.Struct):
    """One sequence to generate, and what of it is not sent yet."""

    index: int
    request: GenerationRequest
    detokenizer: TextStream
    include_stop: bool
    text: str = ""
    logprobs: list[TokenLogprobs] = []
    """Of the tokens of ``text``."""
    held_back: list[TokenLogprobs] = []
    """Of tokens whose text may yet become part of a stop string, or of a character."""
    num_chars: int = 0
    """Characters of text so far, sent or not."""
    num_token_chars: int = 0
    """Characters of the tokens whose log-probabilities were let go."""

    def take(self) -> tuple[str, list[TokenLogprobs]]:
        """The text that is not sent yet, with its log-probabilities; they are the caller's now."""
        taken = self.text, self.logprobs
        self.text, self.logprobs = "", []
        return taken


class Admission:
    """Opens when every choice was accepted by the dispatcher, or when waiting for that has gone on long enough.

    Until then nothing is sent, so that a refusal can still be an HTTP status.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_missing = num_choices
        self._open = asyncio.Event()

    def arrive(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._open.set()

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


class Generation:
    """The choices of one request on one model version."""

    def __init__(
        self, call: Call, dispatch: Dispatch, model: ServedModel, choices: Sequence[Choice], gaps: TokenGaps
    ) -> None:
        self._call = call
        self._dispatch = dispatch
        self._model = model
        self._choices = choices
        self._gaps = gaps
        self.admission = Admission(len(choices))

    async def run(self, sink: Sink) -> None:
        """Generate everything into ``sink``.

        Raises:
            HeadraceError: a choice was refused or lost; the others are aborted.
        """
        if len(self._choices) == 1:
            await self._run_choice(self._choices[0], sink)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(self._run_choice(choice, sink))
        except* HeadraceError as errors:
            raise _first(errors) from None

    async def _run_choice(self, choice: Choice, sink: Sink) -> None:
        async with self._dispatch.stream(choice.request, self._model.name, self._model.version) as stream:
            self.admission.arrive()
            await self.admission.wait()
            await sink.begin()
            previous: float | None = None
            # Leaving the block aborts what still runs, and only that.
            async for delta in stream:
                if delta.token_ids:
                    previous = self._note_tokens(len(delta.token_ids), previous)
                finish_reason = self._push(choice, delta)
                if finish_reason is not None:
                    self._note_end(stream.breakdown, delta.timing)
                    await sink.last(choice.index, *choice.take(), finish_reason)
                    return
                # A client or a gateway that falls behind gets fewer and larger chunks.
                if choice.text and stream.num_unread == 0:
                    await sink.text(choice.index, *choice.take())
        raise EngineDead("The worker's stream ended before the generation did.")

    def _note_tokens(self, num_tokens: int, previous: float | None) -> float:
        now = self._call.clock.monotonic()
        if previous is not None:
            self._gaps.observe(self._model.name, now - previous, num_tokens)
        elif self._call.first_token_at is None:
            self._call.first_token_at = now
        return now

    def _push(self, choice: Choice, delta: SequenceDelta) -> str | None:
        """Add new tokens to the choice's text; its finish reason when it has ended."""
        if delta.finish is FinishReason.ERROR:
            raise from_code(delta.error_code, delta.error or "The engine gave up on this request.")
        if delta.finish is FinishReason.ABORT:
            raise EngineDead("The worker ended this request early.", retry_after_s=1.0)
        token_ids, logprobs = delta.token_ids, delta.logprobs
        num_tokens = len(token_ids)
        if delta.finish is FinishReason.STOP and not choice.include_stop:
            # The stop token itself comes last; it is counted but never shown.
            token_ids, logprobs = token_ids[:-1], logprobs[: len(token_ids) - 1]
        start = self._call.clock.monotonic()
        new = choice.detokenizer.push(token_ids)
        text, stopped_by = new.text, new.stopped_by
        if stopped_by is not None:
            num_tokens = new.num_tokens_used
        elif delta.finish is not None:
            rest = choice.detokenizer.finish()
            text, stopped_by = text + rest.text, rest.stopped_by
        self._call.breakdown.detokenize += self._call.clock.monotonic() - start
        self._call.usage.num_output += num_tokens
        ended = stopped_by is not None or delta.finish is not None
        choice.text += text
        choice.num_chars += len(text)
        if logprobs or choice.held_back:
            choice.held_back += logprobs
            self._release(choice, all_of_them=ended and stopped_by is None)
        if not ended:
            return None
        reason = "length" if stopped_by is None and delta.finish is FinishReason.LENGTH else "stop"
        self._call.finish_reasons.append(reason)
        return reason

    def _release(self, choice: Choice, *, all_of_them: bool) -> None:
        """Let go of the entries of tokens whose text, or its beginning, is shown by now."""
        num_shown = len(choice.held_back)
        if not all_of_them:
            for position, entry in enumerate(choice.held_back):
                if choice.num_token_chars >= choice.num_chars:
                    num_shown = position
                    break
                choice.num_token_chars += len(self._model.tokenizer.token_text(entry.token_id))
        choice.logprobs += choice.held_back[:num_shown]
        choice.held_back = choice.held_back[num_shown:]

    def _note_end(self, stream: StreamBreakdown, engine: SequenceTiming | None) -> None:
        times = self._call.breakdown
        times.queue = max(times.queue, stream.queue_s or 0.0)
        times.dispatch = max(times.dispatch, stream.dispatch_s or 0.0)
        if engine is not None:
            times.worker_wait = max(times.worker_wait, engine.wait_s)
            times.prefill = max(times.prefill, engine.prefill_s)
            times.decode = max(times.decode, engine.decode_s)
            self._call.usage.num_cached = max(self._call.usage.num_cached, engine.num_cached_tokens)


async def supervise(
    call: Call,
    work: Coroutine[object, object, None],
    *,
    timeout_s: float,
    expelled: asyncio.Future[HeadraceError],
    first_tick_s: float = math.inf,
    tick_s: float = math.inf,
    on_tick: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run ``work`` while the client is there, and end it in every case before returning.

    ``on_tick`` is called after ``first_tick_s`` seconds, then every ``tick_s``.

    Raises:
        ClientGone: the client left; ``work`` was cancelled.
        DeadlineExceeded: ``timeout_s`` seconds have passed.
        HeadraceError: what ``work`` raised, or the result of ``expelled`` when that is set.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    next_tick_s = first_tick_s
    task: asyncio.Task[None] = loop.create_task(work, name=f"generate-{call.uid}")
    watch = loop.create_task(call.disconnected(), name=f"watch-{call.uid}")
    waits: set[asyncio.Future[Any]] = {task, watch, expelled}
    try:
        while True:
            wait_s = max(0.0, min(next_tick_s, deadline - loop.time()))
            done, _ = await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                task.result()
                return
            if watch in done:
                raise ClientGone("The client left before the answer was complete.")
            if expelled in done:
                raise expelled.result()
            if loop.time() >= deadline:
                raise DeadlineExceeded(f"The request did not end within {timeout_s:g} s.")
            if on_tick is not None:
                await on_tick()
            next_tick_s = tick_s
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _first(errors: BaseExceptionGroup[HeadraceError]) -> HeadraceError:
    """The error that was raised first; a group keeps them in that order."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
