"""The generation endpoints: parse, find the model, make the prompt, generate, answer."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import msgspec

from headrace.core.errors import ClientGone, Draining, HeadraceError, InvalidRequest, Overloaded
from headrace.core.ids import SequenceId
from headrace.core.requests import GenerationRequest, StopConditions
from headrace.gateway.auth import cache_salt
from headrace.gateway.call import Call
from headrace.gateway.deps import GatewayDeps
from headrace.gateway.errors import as_headrace
from headrace.gateway.generate import Choice, Generation, supervise
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.models import ModelDirectory, ServedModel
from headrace.gateway.prompt import chat_prompt, output_limit, text_prompt
from headrace.gateway.schema import Params, choice_seed, parse_chat, parse_completion
from headrace.gateway.shapes import Completion
from headrace.gateway.sinks import Collect, Collected, Streamed, chat_completion, text_completion
from headrace.gateway.sse import ChatChunks, ChunkEncoder, SseResponse, TextChunks
from headrace.prompts.text import TextStream

_LAST_WORDS_S = 1.0
"""How long the error at the end of a stream may wait for a client that does not read."""


class GenerationHandlers:
    """``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, deps: GatewayDeps, models: ModelDirectory, metrics: GatewayMetrics) -> None:
        self._deps = deps
        self._config = deps.config
        self._models = models
        self._metrics = metrics
        self._num_active = 0
        self._expelled: asyncio.Future[HeadraceError] | None = None
        self.draining = False

    def expel(self) -> None:
        """End every generation that still runs with an honest error: the time to drain is over."""
        if self._expelled is not None and not self._expelled.done():
            self._expelled.set_result(Draining("The server is shutting down.", retry_after_s=1.0))

    async def chat(self, call: Call) -> None:
        """``POST /v1/chat/completions``."""
        with self._permit():
            request = parse_chat(await call.read_json(), self._config)
            params = request.params
            model = self._resolve(call, params)
            prompt = await chat_prompt(call, request, model)
            choices = self._choices(call, "chatcmpl", params, model, [prompt], "messages")
            if params.stream:
                chunks = ChatChunks(call, params, model, len(choices))
                await self._stream(call, params, model, choices, chunks)
                return
            collected = await self._collect(call, model, choices)
            await _answer(call, chat_completion(call, params, model, collected))

    async def completion(self, call: Call) -> None:
        """``POST /v1/completions``."""
        with self._permit():
            request = parse_completion(await call.read_json(), self._config)
            params = request.params
            model = self._resolve(call, params)
            prompts = [await text_prompt(call, prompt, model) for prompt in request.prompts]
            choices = self._choices(call, "cmpl", params, model, prompts, "prompt")
            echo = _echoes(request.prompts, params, model) if request.echo else [""] * len(choices)
            if params.stream:
                chunks = TextChunks(call, params, model, echo)
                await self._stream(call, params, model, choices, chunks)
                return
            collected = await self._collect(call, model, choices)
            await _answer(call, text_completion(call, params, model, collected, echo))

    @contextlib.contextmanager
    def _permit(self) -> Iterator[None]:
        """One of the gateway's places for generations, for as long as the block runs.

        Raises:
            Draining: the gateway is shutting down.
            Overloaded: all places are taken.
        """
        if self.draining:
            raise Draining("The server is shutting down.", retry_after_s=1.0)
        if self._num_active >= self._config.max_concurrent_requests:
            raise Overloaded(f"This gateway serves {self._num_active} requests already, its limit.", retry_after_s=1.0)
        self._num_active += 1
        self._metrics.in_flight.set(self._num_active)
        try:
            yield
        finally:
            self._num_active -= 1
            self._metrics.in_flight.set(self._num_active)

    def _resolve(self, call: Call, params: Params) -> ServedModel:
        model = self._models.resolve(params.model)
        call.model = model.name
        for name, ids in (("logit_bias", params.sampling.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if ids and max(ids) >= model.vocab_size:
                raise InvalidRequest(
                    f"{name} names token {max(ids)}; this model's ids are 0 to {model.vocab_size - 1}.", param=name
                )
        return model

    def _choices(
        self, call: Call, prefix: str, params: Params, model: ServedModel, prompts: Sequence[list[int]], param: str
    ) -> list[Choice]:
        """``n`` sequences for each prompt, in OpenAI's order: all of the first prompt, then all of the second."""
        tenant_id = call.caller.tenant_id
        salt = cache_salt(self._config.salt_secret, tenant_id)
        eos_ids = () if params.ignore_eos else tuple(sorted(model.tokenizer.eos_token_ids))
        call.usage.num_prompt = sum(len(prompt) for prompt in prompts)
        choices: list[Choice] = []
        for prompt in prompts:
            stop = StopConditions(
                max_tokens=output_limit(params, len(prompt), model, param),
                stop_token_ids=tuple(dict.fromkeys(params.stop_token_ids + eos_ids)),
                min_tokens=params.min_tokens,
            )
            for _ in range(params.num_choices):
                index = len(choices)
                request = GenerationRequest(
                    sequence_id=SequenceId(f"{prefix}-{call.uid}/{index}"),
                    tenant_id=tenant_id,
                    prompt=prompt,
                    stop=stop,
                    sampling=msgspec.structs.replace(params.sampling, seed=choice_seed(params.sampling.seed, index)),
                    service_class=params.service_class,
                    cache_salt=salt,
                )
                detokenizer = TextStream(
                    model.tokenizer,
                    prompt_ids=prompt,
                    stop=params.stop,
                    include_stop=params.include_stop,
                    skip_special_tokens=params.skip_special_tokens,
                )
                choices.append(Choice(index, request, detokenizer, params.include_stop))
        return choices

    async def _collect(self, call: Call, model: ServedModel, choices: Sequence[Choice]) -> list[Collected]:
        sink = Collect(len(choices))
        generation = Generation(call, self._deps.dispatcher, model, choices, self._metrics.token_gaps)
        timeout_s = self._config.request_timeout_s
        await supervise(call, generation.run(sink), timeout_s=timeout_s, expelled=self._expulsion())
        return sink.choices

    async def _stream(
        self, call: Call, params: Params, model: ServedModel, choices: Sequence[Choice], chunks: ChunkEncoder
    ) -> None:
        response = SseResponse(call)
        generation = Generation(call, self._deps.dispatcher, model, choices, self._metrics.token_gaps)

        async def tick() -> None:
            generation.admission.open()
            await response.keep_alive()

        try:
            await supervise(
                call,
                generation.run(Streamed(response, chunks, len(choices))),
                timeout_s=self._config.request_timeout_s,
                expelled=self._expulsion(),
                first_tick_s=self._config.admission_grace_s,
                # A tick sends a comment if nothing was sent since the tick before, so silence lasts two at most.
                tick_s=self._config.keepalive_s / 2,
                on_tick=tick,
            )
        except ClientGone:
            raise
        except Exception as error:
            if not response.begun:
                raise
            call.note_error(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await response.fail(as_headrace(error))
        else:
            await response.end(chunks.usage(call) if params.include_usage else b"")

    def _expulsion(self) -> asyncio.Future[HeadraceError]:
        if self._expelled is None:
            self._expelled = asyncio.get_running_loop().create_future()
        return self._expelled


async def _answer(call: Call, completion: Completion) -> None:
    timing = call.breakdown.server_timing().encode()
    await call.answer(msgspec.json.encode(completion), headers=[(b"server-timing", timing)])


def _echoes(prompts: Sequence[str] | Sequence[list[int]], params: Params, model: ServedModel) -> list[str]:
    """The text of each choice's prompt."""
    texts = [p if isinstance(p, str) else model.tokenizer.decode(p) for p in prompts]
    return [text for text in texts for _ in range(params.num_choices)]
