"""Whatever a caller sends: a 4xx in OpenAI's shape, at once, and nobody else notices."""

import asyncio
import json
import time

import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}


def chat(**changes):
    return json.dumps({**GOOD, **changes}).encode()


def text(**changes):
    return json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 2, **changes}).encode()


def message(**fields):
    return chat(messages=[{"role": "user", "content": "Hi", **fields}])


def raw(value: str, field: str = "temperature") -> bytes:
    return chat()[:-1] + f', "{field}": {value}}}'.encode()


MALFORMED = {
    "empty": b"",
    "not json": b"hello",
    "cut": chat()[:-5],
    "trailing": chat() + b"x",
    "two documents": chat() + chat(),
    "single quotes": b"{'model': 'tiny'}",
    "comment": b"/* */" + chat(),
    "byte order mark": b"\xef\xbb\xbf" + chat(),
    "array": b"[]",
    "string": b'"tiny"',
    "null": b"null",
    "nan": raw("NaN"),
    "infinity": raw("Infinity"),
    "minus infinity": raw("-Infinity"),
    "1e400": raw("1e400"),
    "-1e400": raw("-1e400"),
    "1e400 in a bias": raw('{"1": 1e400}', "logit_bias"),
    "leading zero": raw("01"),
    "hexadecimal": raw("0x1"),
    "deep array": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "deep in a field": raw("[" * 50_000 + "]" * 50_000, "tools"),
    "deep in an ignored part": message(content=[{"type": "text", "text": "x"}])[:-4]
    + b', "x": '
    + b"[" * 50_000
    + b"]" * 50_000
    + b"}]}]}",
    "bad utf-8": chat(model="X").replace(b"X", b"\xff\xfe"),
    "overlong utf-8": chat(model="X").replace(b"X", b"\xc0\x80"),
    "surrogate in utf-8": chat(model="X").replace(b"X", b"\xed\xa0\x80"),
    "lone surrogate": chat(model="X").replace(b"X", b"\\ud800"),
    "control character": chat(model="X").replace(b"X", b"\n"),
    "utf-16": chat().decode().encode("utf-16"),
    "key twice": chat()[:-1] + b', "n": 1, "n": 2}',
    "key twice inside": raw('{"1": 1, "1": 2}', "logit_bias"),
}

# name -> (path, body, param)
WRONG = {
    "no model": (CHAT, json.dumps({"messages": GOOD["messages"]}).encode(), "model"),
    "no messages": (CHAT, json.dumps({"model": "tiny"}).encode(), "messages"),
    "no prompt": (TEXT, json.dumps({"model": "tiny"}).encode(), "prompt"),
    "model is null": (CHAT, chat(model=None), "model"),
    "model is empty": (CHAT, chat(model=""), "model"),
    "model is endless": (CHAT, chat(model="x" * 5000), "model"),
    "unknown field": (CHAT, chat(temprature=1), "temprature"),
    "unknown field in a message": (CHAT, message(colour="red"), "messages[0].colour"),
    "unknown stream option": (CHAT, chat(stream=True, stream_options={"x": 1}), "stream_options.x"),
    "stream options without a stream": (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    "empty messages": (CHAT, chat(messages=[]), "messages"),
    "messages is text": (CHAT, chat(messages="Hi"), "messages"),
    "messages of text": (CHAT, chat(messages=["Hi"]), "messages[0]"),
    "too many messages": (CHAT, chat(messages=GOOD["messages"] * 5000), "messages"),
    "no role": (CHAT, chat(messages=[{"content": "Hi"}]), "messages[0].role"),
    "unknown role": (CHAT, message(role="king"), "messages[0].role"),
    "tool role": (CHAT, message(role="tool", tool_call_id="x"), "messages[0].role"),
    "content is a number": (CHAT, message(content=1), "messages[0].content"),
    "content is missing": (CHAT, message(content=None), "messages[0].content"),
    "content without parts": (CHAT, message(content=[]), "messages[0].content"),
    "image part": (
        CHAT,
        message(content=[{"type": "image_url", "image_url": {"url": "http://x"}}]),
        "messages[0].content[0]",
    ),
    "tool calls": (CHAT, message(role="assistant", tool_calls=[{"id": "x"}]), "messages[0].tool_calls"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    "forced tool": (CHAT, chat(tool_choice="required"), "tool_choice"),
    "functions": (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    "json object": (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    "json schema": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
    "audio": (CHAT, chat(modalities=["text", "audio"], audio={"voice": "x"}), "audio"),
    "store": (CHAT, chat(store=True), "store"),
    "service tier": (CHAT, chat(service_tier="gold"), "service_tier"),
    "template in the request": (CHAT, chat(chat_template="{{ 1 }}"), "chat_template"),
    "template through the back door": (
        CHAT,
        chat(chat_template_kwargs={"chat_template": "x"}),
        "chat_template_kwargs",
    ),
    "tokenize through the back door": (CHAT, chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
    "structure for the template": (
        CHAT,
        chat(chat_template_kwargs={"enable_thinking": [1]}),
        "chat_template_kwargs",
    ),
    "looping template": (CHAT, message(content="loop for ever"), "messages"),
    "temperature too high": (CHAT, chat(temperature=2.1), "temperature"),
    "temperature below zero": (CHAT, chat(temperature=-0.1), "temperature"),
    "temperature is text": (CHAT, chat(temperature="1"), "temperature"),
    "temperature is a boolean": (CHAT, chat(temperature=True), "temperature"),
    "top_p is negative": (CHAT, chat(top_p=-0.1), "top_p"),
    "top_p is two": (CHAT, chat(top_p=2), "top_p"),
    "top_k is below": (CHAT, chat(top_k=-2), "top_k"),
    "min_p is two": (CHAT, chat(min_p=2), "min_p"),
    "repetition_penalty is zero": (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    "presence_penalty is three": (CHAT, chat(presence_penalty=3), "presence_penalty"),
    "frequency_penalty is huge": (CHAT, chat(frequency_penalty=1e308), "frequency_penalty"),
    "n is zero": (CHAT, chat(n=0), "n"),
    "n is huge": (CHAT, chat(n=10**6), "n"),
    "n is beyond any integer": (CHAT, chat(n=10**40), "n"),
    "n is a fraction": (CHAT, chat(n=1.5), "n"),
    "n times prompts": (TEXT, text(n=100, prompt=["a", "b"]), "prompt"),
    "max_tokens is zero": (CHAT, chat(max_tokens=0), "max_tokens"),
    "max_tokens is negative": (CHAT, chat(max_tokens=-1), "max_tokens"),
    "max_completion_tokens is zero": (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    "max_tokens beyond the context": (CHAT, chat(max_tokens=2048), "messages"),
    "max_tokens beyond any context": (CHAT, chat(max_tokens=2**40), "max_tokens"),
    "min_tokens above max_tokens": (CHAT, chat(min_tokens=3), "min_tokens"),
    "seed is too large": (CHAT, chat(seed=2**63), "seed"),
    "seed is too small": (CHAT, chat(seed=-(2**63) - 1), "seed"),
    "seed is text": (CHAT, chat(seed="1"), "seed"),
    "empty stop": (CHAT, chat(stop=""), "stop"),
    "empty stop in a list": (CHAT, chat(stop=["a", ""]), "stop"),
    "five stops": (CHAT, chat(stop=list("abcde")), "stop"),
    "long stop": (CHAT, chat(stop="x" * 257), "stop"),
    "stop is a number": (CHAT, chat(stop=1), "stop"),
    "too many stop tokens": (CHAT, chat(stop_token_ids=list(range(129))), "stop_token_ids"),
    "stop token outside": (CHAT, chat(stop_token_ids=[259]), "stop_token_ids"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), "top_logprobs"),
    "top_logprobs is 21": (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "logprobs is a number": (CHAT, chat(logprobs=5), "logprobs"),
    "legacy logprobs is 21": (TEXT, text(logprobs=21), "logprobs"),
    "bias key": (CHAT, chat(logit_bias={"word": 1}), "logit_bias"),
    "bias key negative": (CHAT, chat(logit_bias={"-1": 1}), "logit_bias"),
    "bias key in other digits": (CHAT, chat(logit_bias={"١": 1}), "logit_bias"),
    "bias outside": (CHAT, chat(logit_bias={"259": 1}), "logit_bias"),
    "bias too strong": (CHAT, chat(logit_bias={"1": 101}), "logit_bias"),
    "bias on everything": (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    "metadata is text": (CHAT, chat(metadata="x"), "metadata"),
    "suffix": (TEXT, text(suffix="x"), "suffix"),
    "best_of": (TEXT, text(best_of=3), "best_of"),
    "echo with logprobs": (TEXT, text(echo=True, logprobs=1), "echo"),
    "prompt is empty": (TEXT, text(prompt=""), "prompt"),
    "prompt without entries": (TEXT, text(prompt=[]), "prompt"),
    "prompt with an empty list": (TEXT, text(prompt=[[]]), "prompt"),
    "prompt is mixed": (TEXT, text(prompt=["a", 1]), "prompt"),
    "prompt is mixed deeper": (TEXT, text(prompt=[1, [2]]), "prompt"),
    "prompt of fractions": (TEXT, text(prompt=[1.5]), "prompt[0]"),
    "prompt outside the vocabulary": (TEXT, text(prompt=[1, 259]), "prompt"),
    "prompt below the vocabulary": (TEXT, text(prompt=[-1]), "prompt"),
    "prompt fills the context": (TEXT, text(prompt=[65] * 2048), "prompt"),
    "prompt too long": (TEXT, text(prompt="a" * 5000), "prompt"),
    "prompt far too long": (TEXT, text(prompt="a" * 3_000_000), "prompt"),
    "messages far too long": (CHAT, message(content="a" * 3_000_000), "messages"),
}

BUDGET_S = 0.05
"""For a refusal, client and server together. Processor time, because others may keep this machine busy."""


async def refused(http, path, body, status, headers=JSON):
    """The error of the quickest of three tries."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        answer = await http.post(path, content=body, headers=headers)
        best = min(best, time.process_time() - start)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert answer.headers["x-request-id"].startswith("req-")
        if best < BUDGET_S:
            break
    assert best < BUDGET_S
    return error


async def read_stream(platform):
    body = json.dumps({**GOOD, "max_tokens": 100, "seed": 1, "stream": True})
    async with platform.http() as http:
        text = (await http.post(CHAT, content=body, headers=JSON)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(platform):
    text = await read_stream(platform)
    assert len(text) == 100
    return text


@pytest_asyncio.fixture(loop_scope="module")
async def bystander(platform, expected):
    """A stream that runs while a test does its worst, and must come out whole."""
    task = asyncio.create_task(read_stream(platform))
    await platform.until(lambda: platform.num_running() > 0 or task.done())
    yield platform
    assert await task == expected


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_bodies(bystander, kind):
    async with bystander.http() as http:
        error = await refused(http, CHAT, MALFORMED[kind], 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", WRONG)
async def test_wrong_values_name_their_parameter(platform, kind):
    path, body, param = WRONG[kind]
    async with platform.http() as http:
        error = await refused(http, path, body, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_the_refusal_of_a_long_prompt_has_the_numbers(platform):
    async with platform.http() as http:
        error = await refused(http, TEXT, text(prompt="a" * 5000), 400)
        both = await refused(http, CHAT, chat(max_tokens=2040), 400)
    assert error["code"] == both["code"] == "context_length_exceeded"
    assert "2048 tokens" in error["message"]
    assert "5000 tokens" in error["message"]
    assert "2040 in the completion" in both["message"]


@pytest.mark.parametrize(("model", "hint"), [("tinny", "'tiny'"), ("zzz", "tiny"), ("tiny@ffffffffffff", "tiny")])
async def test_unknown_models_are_404_with_near_names(platform, model, hint):
    async with platform.http() as http:
        error = await refused(http, CHAT, chat(model=model), 404)
    assert error["code"] == "model_not_found"
    assert hint in error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=["text", "form", "empty", "gzip"],
)
async def test_other_media_types_are_415(platform, headers):
    async with platform.http() as http:
        error = await refused(http, CHAT, chat(), 415, headers)
    assert error["code"] == "unsupported_media_type"


async def test_a_charset_is_allowed(platform):
    async with platform.http() as http:
        headers = {"content-type": "application/json; charset=utf-8"}
        assert (await http.post(CHAT, content=chat(), headers=headers)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(launch, chunked):
    platform = await launch(max_body_bytes=10_000)

    async def pieces():
        for _ in range(20):
            yield b" " * 1000

    async with platform.http() as http:
        body = pieces() if chunked else b" " * 20_000
        answer = await http.post(CHAT, content=body, headers=JSON)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert (await http.post(CHAT, content=chat(), headers=JSON)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/../etc/passwd", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("BREW", "/healthz", None, None),
    ],
)
async def test_paths_and_methods_that_are_not(platform, method, path, status, code):
    if status is None:
        # The parser does not know the method; that is a 400, still in our shape.
        answer = await platform.raw(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_value"
        return
    async with platform.http() as http:
        answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
