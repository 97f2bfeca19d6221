"""From messages or text to the token ids of a prompt, within the model's context."""

from headrace.core.errors import ContextLengthExceeded, InvalidRequest
from headrace.gateway.call import Call
from headrace.gateway.models import ServedModel
from headrace.gateway.schema import ChatRequest, Params

_CHARS_PER_TOKEN = 8
"""Texts of more characters than this for each token of context are first judged by their head alone."""


async def chat_prompt(call: Call, request: ChatRequest, model: ServedModel) -> list[int]:
    """Render the conversation with the model's template, and tokenize it.

    Raises:
        InvalidRequest: the model has no chat template, or the template refuses these messages.
        ContextLengthExceeded: no token could be generated after it.
    """
    if model.template is None:
        raise InvalidRequest(f"The model '{model.name}' has no chat template; use /v1/completions.", param="model")
    start = call.clock.monotonic()
    # A template only adds to the messages, so what is hopeless already need not be rendered.
    num_chars = sum(len(str(message["content"])) for message in request.messages)
    text = (
        "".join(str(message["content"]) for message in request.messages)
        if num_chars > _CHARS_PER_TOKEN * model.max_model_len
        else ""
    )
    await _refuse_hopeless(text, model, "messages")
    rendered = await model.template.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        tools=None,
        **request.template_kwargs,
    )
    rendered_at = call.clock.monotonic()
    call.breakdown.template = rendered_at - start
    # Templates write the special tokens themselves.
    ids = await _encode(rendered, model, "messages", add_special_tokens=False)
    call.breakdown.tokenize = call.clock.monotonic() - rendered_at
    return ids


async def text_prompt(call: Call, prompt: str | list[int], model: ServedModel) -> list[int]:
    """Tokenize a text, or check token ids.

    Raises:
        InvalidRequest: empty, or an id outside the vocabulary.
        ContextLengthExceeded: no token could be generated after it.
    """
    if isinstance(prompt, str):
        start = call.clock.monotonic()
        ids = await _encode(prompt, model, "prompt", add_special_tokens=True)
        call.breakdown.tokenize += call.clock.monotonic() - start
        return ids
    for token_id in prompt:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"prompt has the token id {token_id}; this model's ids are 0 to {model.vocab_size - 1}.",
                param="prompt",
            )
    return _check_length(prompt, model, "prompt")


def output_limit(params: Params, num_prompt: int, model: ServedModel, param: str) -> int:
    """How many tokens to generate at most.

    Raises:
        ContextLengthExceeded: the prompt and ``max_tokens`` together do not fit.
    """
    room = model.max_model_len - num_prompt
    if params.max_tokens is None:
        limit = room
    elif params.max_tokens <= room:
        limit = params.max_tokens
    else:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you requested "
            f"{num_prompt + params.max_tokens} tokens ({num_prompt} in the {param}, {params.max_tokens} in the "
            f"completion). Please reduce the length of the {param} or of the completion.",
            param=param,
        )
    if params.min_tokens > limit:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but only {limit} tokens fit after the {param}.", param="min_tokens"
        )
    return limit


async def _encode(text: str, model: ServedModel, param: str, *, add_special_tokens: bool) -> list[int]:
    await _refuse_hopeless(text, model, param)
    ids = await model.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
    return _check_length(ids, model, param)


async def _refuse_hopeless(text: str, model: ServedModel, param: str) -> None:
    """Refuse a text far beyond the context by its head, so that the refusal costs no more than a full prompt."""
    head_chars = _CHARS_PER_TOKEN * model.max_model_len
    if len(text) <= head_chars:
        return
    num_head = len(await model.tokenizer.encode_async(text[:head_chars], add_special_tokens=False))
    # The cut can split a token at the head's end, hence the margin.
    if num_head > model.max_model_len + 16:
        raise _too_long(f"at least {num_head}", model, param)


def _check_length(ids: list[int], model: ServedModel, param: str) -> list[int]:
    if not ids:
        raise InvalidRequest(f"{param} has no tokens; at least one is needed.", param=param)
    if len(ids) >= model.max_model_len:
        raise _too_long(str(len(ids)), model, param)
    return ids


def _too_long(num_tokens: str, model: ServedModel, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {model.max_model_len} tokens. However, your {param} resulted in "
        f"{num_tokens} tokens. Please reduce the length of the {param}.",
        param=param,
    )
