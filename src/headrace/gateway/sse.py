"""Server-sent events: chunks spliced from parts encoded once, errors that are honest, comments that keep proxies calm.

A chunk of a stream differs from the one before in its text alone, so everything around the text is encoded once for
each choice:

    data: {"id":…,"object":…,"created":…,"model":…,"choices":[{"index":0,"delta":{"content":  "text"  },"logprobs":…
    └──────────────────────────────── prefix, once ─────────────────────────────────────────┘         └─ suffix ──
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.frames import TokenLogprobs
from headrace.gateway.call import Call
from headrace.gateway.errors import Headers, error_json
from headrace.gateway.models import ServedModel
from headrace.gateway.schema import Params
from headrace.gateway.shapes import chat_logprobs, fingerprint, legacy_logprobs, usage_object
from headrace.gateway.timing import FIRST_STAGES

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class ChunkEncoder(Protocol):
    """One endpoint's chunks."""

    def first(self, index: int) -> bytes:
        """What comes before the first text of a choice."""
        ...

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        """New text of a choice."""
        ...

    def last(self, index: int, finish_reason: str) -> bytes:
        """The end of a choice."""
        ...

    def usage(self, call: Call) -> bytes:
        """The chunk that ``include_usage`` asks for: no choices, the request's usage."""
        ...


class _Head:
    """The part that all chunks of a stream share."""

    def __init__(self, call: Call, params: Params, model: ServedModel, object_name: str, id_prefix: str) -> None:
        head = {
            "id": f"{id_prefix}-{call.uid}",
            "object": object_name,
            "created": call.created,
            "model": params.model,
            "system_fingerprint": fingerprint(model.version),
        }
        self.open = b"data: " + _encode(head)[:-1] + b',"choices":['
        # `usage` is null in every chunk but the last if it was asked for, and absent if not.
        self.close = b'],"usage":null}\n\n' if params.include_usage else b"]}\n\n"

    def usage(self, call: Call) -> bytes:
        return self.open + b'],"usage":' + _encode(usage_object(call.usage)) + b"}\n\n"


class ChatChunks:
    """``chat.completion.chunk``."""

    def __init__(self, call: Call, params: Params, model: ServedModel, num_choices: int) -> None:
        self._head = _Head(call, params, model, "chat.completion.chunk", "chatcmpl")
        self._tokenizer = model.tokenizer
        self._prefixes = [b'%s{"index":%d,"delta":' % (self._head.open, i) for i in range(num_choices)]
        self._suffix = b'},"logprobs":null,"finish_reason":null}' + self._head.close

    def first(self, index: int) -> bytes:
        role = b'{"role":"assistant","content":"","refusal":null'
        return self._prefixes[index] + role + self._suffix

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        start = self._prefixes[index] + b'{"content":' + _encode(text)
        if not logprobs:
            return start + self._suffix
        encoded = _encode(chat_logprobs(self._tokenizer, logprobs))
        return start + b'},"logprobs":' + encoded + b',"finish_reason":null}' + self._head.close

    def last(self, index: int, finish_reason: str) -> bytes:
        reason = _encode(finish_reason)
        return self._prefixes[index] + b'{},"logprobs":null,"finish_reason":' + reason + b"}" + self._head.close

    def usage(self, call: Call) -> bytes:
        return self._head.usage(call)


class TextChunks:
    """``text_completion`` chunks of the legacy endpoint; ``echo`` holds what comes before each choice's text."""

    def __init__(self, call: Call, params: Params, model: ServedModel, echo: Sequence[str]) -> None:
        self._head = _Head(call, params, model, "text_completion", "cmpl")
        self._tokenizer = model.tokenizer
        self._num_top = params.sampling.logprobs or 0
        self._echo = echo
        self._offsets = [0] * len(echo)
        self._prefixes = [b'%s{"index":%d,"text":' % (self._head.open, i) for i in range(len(echo))]
        self._suffix = b',"logprobs":null,"finish_reason":null}' + self._head.close

    def first(self, index: int) -> bytes:
        return self.text(index, self._echo[index], ()) if self._echo[index] else b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        start = self._prefixes[index] + _encode(text)
        if not logprobs:
            return start + self._suffix
        columns, self._offsets[index] = legacy_logprobs(
            self._tokenizer, logprobs, num_top=self._num_top, offset=self._offsets[index]
        )
        return start + b',"logprobs":' + _encode(columns) + b',"finish_reason":null}' + self._head.close

    def last(self, index: int, finish_reason: str) -> bytes:
        reason = _encode(finish_reason)
        return self._prefixes[index] + b'"","logprobs":null,"finish_reason":' + reason + b"}" + self._head.close

    def usage(self, call: Call) -> bytes:
        return self._head.usage(call)


class SseResponse:
    """An event stream on one call. Writes wait for the client to read; there is no buffer of our own."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.begun = False
        self._num_writes = 0
        self._num_writes_seen = 0

    async def begin(self) -> None:
        """Send the headers at once, with the part of the breakdown that is known. Only the first call does anything."""
        if self.begun:
            return
        self.begun = True
        headers: Headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # Asks nginx not to collect the events.
            (b"x-accel-buffering", b"no"),
            (b"server-timing", self._call.breakdown.server_timing(FIRST_STAGES).encode()),
        ]
        await self._call.begin(200, headers)

    async def write(self, events: bytes) -> None:
        """Send whole events."""
        self._num_writes += 1
        start = self._call.clock.monotonic()
        await self._call.send({"type": "http.response.body", "body": events, "more_body": True})
        self._call.breakdown.write += self._call.clock.monotonic() - start

    async def keep_alive(self) -> None:
        """Send the headers if that has not happened, or a comment if nothing was sent since the last call.

        Nothing is added while an earlier write waits for the client to read.
        """
        if not self.begun:
            await self.begin()
        elif self._num_writes == self._num_writes_seen and not self._call.sending:
            await self.write(KEEP_ALIVE)
        self._num_writes_seen = self._num_writes

    async def end(self, last: bytes = b"") -> None:
        """Finish a good stream: ``last``, the breakdown as a comment, ``[DONE]``."""
        timing = self._call.breakdown.server_timing().encode()
        await self._finish(last + b": server-timing " + timing + b"\n\n" + DONE)

    async def fail(self, error: HeadraceError) -> None:
        """Finish a stream that went wrong after it had begun: the error, then ``[DONE]``, and no finish_reason."""
        self._call.error = error
        await self._finish(b"data: " + error_json(error) + b"\n\n" + DONE)

    async def _finish(self, events: bytes) -> None:
        await self._call.send({"type": "http.response.body", "body": events, "more_body": False})
