"""What callers send, as it stands in OpenAI's reference, with the extensions in vLLM's spelling.

These types say which fields exist and of which JSON type they are; :mod:`headrace.gateway.schema` decides what is
allowed and turns them into what the rest of the platform knows.
"""

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted: chunks are not padded, whatever it says."""


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; only ``text`` parts are served, the others are named in the refusal."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both generation endpoints."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    service_tier: str | None = None

    # Accepted and without effect here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


class ChatBody(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Accepted where the value asks for nothing, else refused.
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None


class CompletionBody(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: Any = None
