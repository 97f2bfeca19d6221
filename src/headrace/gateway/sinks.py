"""Where a generation's text goes: gathered for one answer, or sent as it comes."""

from collections.abc import Sequence

import msgspec

from headrace.core.frames import TokenLogprobs
from headrace.gateway.call import Call
from headrace.gateway.models import ServedModel
from headrace.gateway.schema import Params
from headrace.gateway.shapes import (
    ChatChoice,
    ChatMessage,
    Completion,
    TextChoice,
    chat_logprobs,
    fingerprint,
    legacy_logprobs,
    usage_object,
)
from headrace.gateway.sse import ChunkEncoder, SseResponse


class Collected(msgspec.Struct):
    """One choice of an answer that is not streamed."""

    parts: list[str] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str = ""


class Collect:
    """A sink that keeps everything."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [Collected() for _ in range(num_choices)]

    async def begin(self) -> None:
        """Nothing is sent before the end."""

    async def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> None:
        self.choices[index].parts.append(text)
        self.choices[index].logprobs.extend(logprobs)

    async def last(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str) -> None:
        await self.text(index, text, logprobs)
        self.choices[index].finish_reason = finish_reason


class Streamed:
    """A sink that sends everything at once: what one frame brought for a choice is one write."""

    def __init__(self, response: SseResponse, chunks: ChunkEncoder, num_choices: int) -> None:
        self._response = response
        self._chunks = chunks
        self._silent = [True] * num_choices

    async def begin(self) -> None:
        await self._response.begin()

    async def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> None:
        await self._response.write(self._first(index) + self._chunks.text(index, text, logprobs))

    async def last(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str) -> None:
        events = self._first(index)
        if text or logprobs:
            events += self._chunks.text(index, text, logprobs)
        await self._response.write(events + self._chunks.last(index, finish_reason))

    def _first(self, index: int) -> bytes:
        if not self._silent[index]:
            return b""
        self._silent[index] = False
        return self._chunks.first(index)


def chat_completion(call: Call, params: Params, model: ServedModel, collected: Sequence[Collected]) -> Completion:
    """The whole answer of the chat endpoint."""
    want = params.sampling.logprobs is not None
    choices = [
        ChatChoice(
            index,
            ChatMessage("".join(choice.parts)),
            chat_logprobs(model.tokenizer, choice.logprobs) if want else None,
            choice.finish_reason,
        )
        for index, choice in enumerate(collected)
    ]
    return _completion(call, params, model, "chat.completion", "chatcmpl", choices)


def text_completion(
    call: Call, params: Params, model: ServedModel, collected: Sequence[Collected], echo: Sequence[str]
) -> Completion:
    """The whole answer of the legacy endpoint; ``echo`` holds what comes before each choice's text."""
    num_top = params.sampling.logprobs
    choices = []
    for index, choice in enumerate(collected):
        logprobs = None
        if num_top is not None:
            logprobs, _ = legacy_logprobs(model.tokenizer, choice.logprobs, num_top=num_top, offset=0)
        choices.append(TextChoice(index, echo[index] + "".join(choice.parts), logprobs, choice.finish_reason))
    return _completion(call, params, model, "text_completion", "cmpl", choices)


def _completion(
    call: Call,
    params: Params,
    model: ServedModel,
    object_name: str,
    prefix: str,
    choices: list[ChatChoice] | list[TextChoice],
) -> Completion:
    return Completion(
        id=f"{prefix}-{call.uid}",
        object=object_name,
        created=call.created,
        model=params.model,
        choices=choices,
        usage=usage_object(call.usage),
        system_fingerprint=fingerprint(model.version),
    )
