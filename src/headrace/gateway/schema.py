"""Parse once: from wire types to the requests that the rest of the gateway believes without asking again."""

import hashlib
import secrets
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.core.requests import MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams, ServiceClass
from headrace.gateway.config import GatewayConfig
from headrace.gateway.decode import decode
from headrace.gateway.wire import ChatBody, Common, CompletionBody, Message

MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's legacy endpoint generates when it is not told."""

_TIERS = {
    "auto": ServiceClass.DEFAULT,
    "default": ServiceClass.DEFAULT,
    "flex": ServiceClass.FLEX,
    "priority": ServiceClass.PRIORITY,
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Templates know no ``developer``; OpenAI introduced it as the new name of ``system``."""

_TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string"})
"""What a caller may hand to a chat template. Never ``tokenize`` or ``chat_template``: those are ours."""

Scalar = str | int | float | bool
T = TypeVar("T")


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate; valid by construction. ``sampling.seed`` is the request's, not yet a choice's."""

    model: str
    stream: bool
    include_usage: bool
    num_choices: int
    max_tokens: int | None
    """None: as many as the endpoint's default says."""
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool
    service_class: ServiceClass


class ChatRequest(msgspec.Struct, frozen=True):
    params: Params
    messages: list[dict[str, object]]
    add_generation_prompt: bool
    template_kwargs: dict[str, Scalar]


class CompletionRequest(msgspec.Struct, frozen=True):
    params: Params
    prompts: list[str] | list[list[int]]
    echo: bool


def parse_chat(body: bytes, config: GatewayConfig) -> ChatRequest:
    """Read the body of ``/v1/chat/completions``.

    Raises:
        InvalidRequest: with ``param`` set to the field that is wrong or asks for what is not served.
    """
    wire = decode(body, ChatBody)
    _refuse_unserved_chat(wire)
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    _check_range("top_logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
    max_tokens, name = wire.max_tokens, "max_tokens"
    if wire.max_completion_tokens is not None:
        max_tokens, name = wire.max_completion_tokens, "max_completion_tokens"
    return ChatRequest(
        _params(wire, config, logprobs=logprobs, max_tokens=max_tokens, max_tokens_name=name),
        _messages(wire.messages, config),
        wire.add_generation_prompt is not False,
        _template_kwargs(wire.chat_template_kwargs or {}),
    )


def parse_completion(body: bytes, config: GatewayConfig) -> CompletionRequest:
    """Read the body of ``/v1/completions``.

    Raises:
        InvalidRequest: as for :func:`parse_chat`.
    """
    wire = decode(body, CompletionBody)
    if wire.suffix:
        raise InvalidRequest("suffix is not supported: no served model fills in the middle.", param="suffix")
    if wire.best_of is not None and wire.best_of != (wire.n or 1):
        raise InvalidRequest(
            f"best_of is {wire.best_of}; only the value of n ({wire.n or 1}) is supported.", param="best_of"
        )
    _refuse_format(wire.response_format)
    _check_range("logprobs", wire.logprobs, 0, MAX_TOP_LOGPROBS)
    if wire.echo and wire.logprobs is not None:
        raise InvalidRequest(
            "echo cannot be combined with logprobs: log-probabilities of prompt tokens are not computed.", param="echo"
        )
    prompts = _prompts(wire.prompt, config)
    max_tokens = DEFAULT_COMPLETION_TOKENS if wire.max_tokens is None else wire.max_tokens
    params = _params(wire, config, logprobs=wire.logprobs, max_tokens=max_tokens, num_prompts=len(prompts))
    return CompletionRequest(params, prompts, bool(wire.echo))


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index``, in ``[0, 2**63)``; choice 0 has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED


def _params(
    wire: Common,
    config: GatewayConfig,
    *,
    logprobs: int | None,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    num_prompts: int = 1,
) -> Params:
    num_choices = 1 if wire.n is None else wire.n
    _check_range("n", num_choices, 1, config.max_choices)
    if num_choices * num_prompts > config.max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {num_choices} make {num_prompts * num_choices} choices; "
            f"at most {config.max_choices} are allowed.",
            param="prompt",
        )
    _check_range(max_tokens_name, max_tokens, 1, 2**31 - 1)
    min_tokens = wire.min_tokens or 0
    _check_range("min_tokens", min_tokens, 0, 2**31 - 1)
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}, more than {max_tokens_name} allows.", param="min_tokens")
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", param="stream_options")
    return Params(
        model=_model(wire.model),
        stream=bool(wire.stream),
        include_usage=bool(wire.stream_options and wire.stream_options.include_usage),
        num_choices=num_choices,
        max_tokens=max_tokens,
        sampling=_sampling(wire, config, logprobs),
        stop=_stop(wire.stop, config),
        stop_token_ids=_stop_token_ids(wire.stop_token_ids, config),
        min_tokens=min_tokens,
        ignore_eos=bool(wire.ignore_eos),
        include_stop=bool(wire.include_stop_str_in_output),
        skip_special_tokens=wire.skip_special_tokens is not False,
        service_class=_service_class(wire.service_tier),
    )


def _sampling(wire: Common, config: GatewayConfig, logprobs: int | None) -> SamplingParams:
    if wire.seed is None:
        seed = secrets.randbits(63)
    else:
        _check_range("seed", wire.seed, -(2**63), 2**63 - 1)
        seed = wire.seed & MAX_SEED
    # vLLM writes "keep all" as -1.
    top_k = 0 if wire.top_k is None or wire.top_k == -1 else wire.top_k
    top_p = _or(wire.top_p, 1.0)
    if top_p == 0.0:  # OpenAI accepts it: the smallest nucleus is the likeliest token alone
        top_p, top_k = 1.0, 1
    sampling = SamplingParams(
        seed=seed,
        temperature=_or(wire.temperature, 1.0),
        top_k=top_k,
        top_p=top_p,
        min_p=_or(wire.min_p, 0.0),
        repetition_penalty=_or(wire.repetition_penalty, 1.0),
        presence_penalty=_or(wire.presence_penalty, 0.0),
        frequency_penalty=_or(wire.frequency_penalty, 0.0),
        logit_bias=_logit_bias(wire.logit_bias or {}, config),
        logprobs=logprobs,
    )
    sampling.check()
    return sampling


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", param=name)


def _model(name: str) -> str:
    if not name or len(name) > 256:
        raise InvalidRequest("model must be the name of a model, 1 to 256 characters long.", param="model")
    return name


def _logit_bias(wire: Mapping[str, float], config: GatewayConfig) -> dict[int, float]:
    if len(wire) > config.max_logit_bias:
        raise InvalidRequest(
            f"logit_bias has {len(wire)} entries; at most {config.max_logit_bias} are allowed.", param="logit_bias"
        )
    bias: dict[int, float] = {}
    for key, value in wire.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise InvalidRequest(f"logit_bias has the key {key[:32]!r}; keys are token ids.", param="logit_bias")
        bias[int(key)] = value
    return bias


def _stop(wire: str | list[str] | None, config: GatewayConfig) -> tuple[str, ...]:
    stops = [wire] if isinstance(wire, str) else (wire or [])
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed.", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= config.max_stop_chars:
            raise InvalidRequest(
                f"A stop string has {len(stop)} characters; it must have 1 to {config.max_stop_chars}.", param="stop"
            )
    return tuple(stops)


def _stop_token_ids(wire: list[int] | None, config: GatewayConfig) -> tuple[int, ...]:
    ids = tuple(wire or ())
    if len(ids) > config.max_stop_token_ids:
        raise InvalidRequest(
            f"stop_token_ids has {len(ids)} entries; at most {config.max_stop_token_ids} are allowed.",
            param="stop_token_ids",
        )
    for token_id in ids:
        _check_range("stop_token_ids", token_id, 0, 2**31 - 1)
    return ids


def _service_class(tier: str | None) -> ServiceClass:
    if tier is None:
        return ServiceClass.DEFAULT
    if tier not in _TIERS:
        raise InvalidRequest(
            f"service_tier is {tier[:32]!r}; it must be one of {', '.join(_TIERS)}.", param="service_tier"
        )
    return _TIERS[tier]


def _messages(wire: list[Message], config: GatewayConfig) -> list[dict[str, object]]:
    if not 0 < len(wire) <= config.max_messages:
        raise InvalidRequest(
            f"messages has {len(wire)} entries; it must have 1 to {config.max_messages}.", param="messages"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(wire)]


def _message(wire: Message, where: str) -> dict[str, object]:
    if wire.role not in _ROLES:
        what = "tool messages are not supported" if wire.role in ("tool", "function") else "no such role"
        raise InvalidRequest(
            f"{where}.role is {wire.role[:32]!r}: {what}. Use one of {', '.join(_ROLES)}.", param=f"{where}.role"
        )
    for name in ("tool_calls", "function_call", "audio", "tool_call_id"):
        if getattr(wire, name):
            raise InvalidRequest(f"{where}.{name} is not supported.", param=f"{where}.{name}")
    message: dict[str, object] = {"role": _ROLES[wire.role], "content": _content(wire, where)}
    if wire.name is not None:
        message["name"] = wire.name
    return message


def _content(wire: Message, where: str) -> str:
    if isinstance(wire.content, str):
        return wire.content
    if not wire.content:
        raise InvalidRequest(f"{where}.content must be text or a list of text parts.", param=f"{where}.content")
    texts = []
    for index, part in enumerate(wire.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"{where}.content[{index}] is a part of type {part.type[:32]!r}; only text is supported.",
                param=f"{where}.content[{index}]",
            )
        texts.append(part.text)
    return "\n".join(texts)


def _template_kwargs(wire: Mapping[str, object]) -> dict[str, Scalar]:
    kwargs: dict[str, Scalar] = {}
    for name, value in wire.items():
        if name not in _TEMPLATE_KWARGS:
            raise InvalidRequest(
                f"chat_template_kwargs may hold {', '.join(sorted(_TEMPLATE_KWARGS))}, not {name[:32]!r}.",
                param="chat_template_kwargs",
            )
        if not isinstance(value, Scalar):
            raise InvalidRequest(
                f"chat_template_kwargs.{name} must be a string, a number or a boolean.", param="chat_template_kwargs"
            )
        kwargs[name] = value
    return kwargs


def _prompts(wire: str | list[str | int | list[int]], config: GatewayConfig) -> list[str] | list[list[int]]:
    if isinstance(wire, str):
        return [wire]
    if not wire:
        raise InvalidRequest("prompt is empty.", param="prompt")
    if isinstance(wire[0], int):
        return [_only(wire, int)]
    if len(wire) > config.max_choices:
        raise InvalidRequest(
            f"prompt has {len(wire)} entries; at most {config.max_choices} are allowed.", param="prompt"
        )
    if isinstance(wire[0], str):
        return _only(wire, str)
    return _only(wire, list)


def _only(wire: list[str | int | list[int]], kind: type[T]) -> list[T]:
    items: list[T] = [item for item in wire if isinstance(item, kind)]
    if len(items) != len(wire):
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such lists.", param="prompt"
        )
    return items


def _refuse_unserved_chat(wire: ChatBody) -> None:
    for name in ("tools", "functions", "audio", "prediction", "web_search_options", "moderation"):
        if getattr(wire, name):
            raise InvalidRequest(f"{name} is not supported.", param=name)
    for name, harmless in (
        ("tool_choice", (None, "none", "auto")),
        ("function_call", (None, "none", "auto")),
        ("reasoning_effort", (None, "none")),
        ("verbosity", (None, "medium")),
        ("store", (None, False)),
        ("modalities", (None, ["text"])),
    ):
        if getattr(wire, name) not in harmless:
            raise InvalidRequest(f"{name} is not supported with this value.", param=name)
    _refuse_format(wire.response_format)


def _refuse_format(wire: object) -> None:
    if wire not in (None, {"type": "text"}):
        raise InvalidRequest("response_format is not supported with any type but 'text'.", param="response_format")
