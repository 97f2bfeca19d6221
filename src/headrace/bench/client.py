"""One request against an OpenAI-compatible server, with the time of everything that came back."""

import asyncio
import time
from typing import Literal

import aiohttp
import msgspec

from headrace.bench.sse import EventParser, EventTooLarge

Endpoint = Literal["completions", "chat"]

PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}
MAX_ANSWER_BYTES = 64 * 2**20


class RequestPlan(msgspec.Struct, frozen=True):
    """What to send and when."""

    at_s: float
    """Intended send time, in seconds after the start of the load. Latencies count from here."""
    prompt: list[int] | str
    prompt_tokens: int
    output_tokens: int


class RequestRecord(msgspec.Struct):
    """What became of a request. Times are seconds; an unset time did not happen."""

    prompt_tokens: int
    """As asked for; replaced by the server's usage when there is one."""
    output_tokens: int = 0
    """By the server's usage; without one, the number of chunks with text."""
    asked_output_tokens: int = 0
    error: str | None = None
    """None, or a short kind such as ``http_503:overloaded``, ``timeout``, ``truncated``."""
    intended_at: float = 0.0
    sent_at: float = 0.0
    """On the monotonic clock, like all moments here."""
    finished_at: float = 0.0
    chunk_times: list[float] = []
    """When each chunk with text came."""
    has_usage: bool = False

    @property
    def lateness_s(self) -> float:
        return self.sent_at - self.intended_at

    @property
    def ttft_s(self) -> float | None:
        """From the intended send time to the first text."""
        return self.chunk_times[0] - self.intended_at if self.chunk_times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens or an answer in one piece."""
        if len(self.chunk_times) < 2 or self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.finished_at - self.intended_at


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None

    @property
    def has_text(self) -> bool:
        part = self.delta or self.message
        return bool(self.text or (part and (part.content or part.reasoning_content)))


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or one chunk of a stream; what the benchmark does not need is skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


class ClientOptions(msgspec.Struct, frozen=True):
    """How requests look, the same for all of a run."""

    base_url: str
    """Up to and including ``/v1``."""
    model: str
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = True
    """Send ``ignore_eos``, which vLLM, SGLang and Headrace know, so that every answer has the asked length."""
    request_timeout_s: float = 600.0
    """From the actual send to the last byte."""


class _BadAnswer(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


async def send(
    session: aiohttp.ClientSession, options: ClientOptions, plan: RequestPlan, *, start: float
) -> RequestRecord:
    """Send one request now and read the answer to its end. Never raises for what a server does: ``error`` names it.

    ``start`` is the monotonic time at which the load began.
    """
    record = RequestRecord(
        prompt_tokens=plan.prompt_tokens,
        asked_output_tokens=plan.output_tokens,
        intended_at=start + plan.at_s,
        sent_at=time.monotonic(),
        chunk_times=[],
    )
    try:
        async with asyncio.timeout(options.request_timeout_s):
            await _exchange(session, options, plan, record)
    except _BadAnswer as error:
        record.error = error.kind
    except TimeoutError:
        record.error = "timeout"
    except aiohttp.ClientConnectorError:
        record.error = "connect"
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError):
        record.error = "disconnected"
    except (aiohttp.ClientError, EventTooLarge, msgspec.MsgspecError, UnicodeDecodeError) as error:
        record.error = f"malformed:{type(error).__name__}"
    record.finished_at = time.monotonic()
    return record


async def _exchange(
    session: aiohttp.ClientSession, options: ClientOptions, plan: RequestPlan, record: RequestRecord
) -> None:
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    url = options.base_url.rstrip("/") + PATHS[options.endpoint]
    async with session.post(url, data=msgspec.json.encode(_body(options, plan)), headers=headers) as response:
        if response.status != 200:
            raise _BadAnswer(_refusal(response.status, await _read_all(response)))
        if options.stream:
            await _read_stream(response, record)
        else:
            answer = msgspec.json.decode(await _read_all(response), type=_Answer)
            _raise_error(answer)
            _take_usage(answer, record)
            if not record.has_usage:
                raise _BadAnswer("no_usage")


def _body(options: ClientOptions, plan: RequestPlan) -> dict[str, object]:
    body: dict[str, object] = {
        "model": options.model,
        "max_tokens": plan.output_tokens,
        "temperature": options.temperature,
        "stream": options.stream,
    }
    if options.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": plan.prompt}]
    else:
        body["prompt"] = plan.prompt
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body


async def _read_all(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > MAX_ANSWER_BYTES:
            raise _BadAnswer("too_large")
    return bytes(data)


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    """Read events up to ``[DONE]``; chunks with text are stamped and counted."""
    parser = EventParser()
    async for data in response.content.iter_any():
        now = time.monotonic()
        for event in parser.feed(data):
            if event == b"[DONE]":
                if not record.has_usage:
                    record.output_tokens = len(record.chunk_times)
                return
            chunk = msgspec.json.decode(event, type=_Answer)
            _raise_error(chunk)
            _take_usage(chunk, record)
            if any(choice.has_text for choice in chunk.choices):
                record.chunk_times.append(now)
    raise _BadAnswer("truncated")


def _take_usage(answer: _Answer, record: RequestRecord) -> None:
    if answer.usage is not None:
        record.has_usage = True
        record.prompt_tokens = answer.usage.prompt_tokens
        record.output_tokens = answer.usage.completion_tokens


def _raise_error(answer: _Answer) -> None:
    if answer.error is not None:
        raise _BadAnswer(f"stream_error:{_error_code(answer.error)}")


def _refusal(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Answer).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        error = None
    return f"http_{status}" if error is None else f"http_{status}:{_error_code(error)}"


def _error_code(error: _Error | str) -> str:
    # Error kinds become keys of a report: bounded in length, whatever a server puts there.
    return "unspecified" if isinstance(error, str) else str(error.code or error.type or "unspecified")[:60]
