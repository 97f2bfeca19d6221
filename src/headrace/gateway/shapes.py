"""The answers' JSON, in OpenAI's shapes: whole answers as types, log-probabilities for both endpoints."""

from collections.abc import Sequence

import msgspec

from headrace.core.frames import TokenLogprobs
from headrace.gateway.call import Usage
from headrace.prompts.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0
"""What OpenAI writes for "practically impossible"; JSON has no infinity."""


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class LegacyLogprobs(msgspec.Struct, frozen=True):
    """Columns, one entry for each token; ``text_offset`` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageObject(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str


class Completion(msgspec.Struct, frozen=True):
    """``chat.completion`` or ``text_completion``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[TextChoice]
    usage: UsageObject
    system_fingerprint: str


def usage_object(usage: Usage) -> UsageObject:
    """The usage as callers see it."""
    return UsageObject(
        usage.num_prompt,
        usage.num_output,
        usage.num_prompt + usage.num_output,
        PromptDetails(usage.num_cached),
    )


def fingerprint(version: str) -> str:
    """Equal seeds give equal answers only under an equal fingerprint: it names the model version."""
    return f"fp_{version}"


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Log-probabilities in the shape of the chat endpoint."""

    def item(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TopLogprob(raw.decode("utf-8", "replace"), max(logprob, _LOWEST_LOGPROB), list(raw))

    content = []
    for entry in entries:
        chosen = item(entry.token_id, entry.logprob)
        top = [item(token_id, logprob) for token_id, logprob in entry.top]
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def legacy_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, num_top: int, offset: int
) -> tuple[LegacyLogprobs, int]:
    """Log-probabilities in the shape of the legacy endpoint, and the offset at which the next entries begin.

    ``offset`` is where the first entry's token begins in the choice's text, in characters.
    """
    tokens, offsets, top = [], [], []
    for entry in entries:
        text = tokenizer.token_text(entry.token_id)
        tokens.append(text)
        offsets.append(offset)
        top.append({tokenizer.token_text(i): max(logprob, _LOWEST_LOGPROB) for i, logprob in entry.top})
        offset += len(text)
    logprobs = [max(entry.logprob, _LOWEST_LOGPROB) for entry in entries]
    return LegacyLogprobs(tokens, logprobs, top if num_top else None, offsets), offset
