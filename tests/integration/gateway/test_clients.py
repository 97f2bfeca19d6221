"""The official client, as people use it."""

import asyncio

import openai
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Say something."}]


async def chat(platform, **options):
    async with platform.client() as client:
        return await client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


async def chunks_of(platform, **options):
    async with platform.client() as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options)
        return [chunk async for chunk in stream]


def text_of(chunks, index=0):
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


async def test_an_answer_has_text_usage_and_a_reason(platform):
    answer = await chat(platform, max_tokens=12, seed=1)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_abcdef012345"
    assert choice.message.role == "assistant"
    assert len(choice.message.content) == 12
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer._request_id.startswith("req-")


async def test_a_stream_says_what_an_answer_says(platform):
    answer = await chat(platform, max_tokens=20, seed=5)
    chunks = await chunks_of(platform, max_tokens=20, seed=5)
    assert text_of(chunks) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


async def test_the_synchronous_client_works_too(platform):
    def run():
        with openai.OpenAI(base_url=f"{platform.base_url}/v1", api_key=platform.key, max_retries=0) as client:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=7, seed=3)
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=7, seed=3, stream=True)
            return answer.choices[0].message.content, text_of(list(stream))

    whole, streamed = await asyncio.to_thread(run)
    assert whole == streamed
    assert len(whole) == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_n_choices_has_its_own_text_and_end(platform, stream):
    if stream:
        chunks = await chunks_of(platform, n=4, max_tokens=9, seed=2, stream_options={"include_usage": True})
        texts = [text_of(chunks, i) for i in range(4)]
        ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
        usage = chunks[-1].usage
    else:
        answer = await chat(platform, n=4, max_tokens=9, seed=2)
        texts = [c.message.content for c in answer.choices]
        ends = [c.index for c in answer.choices]
        usage = answer.usage
    alone = await chat(platform, max_tokens=9, seed=2)
    assert sorted(ends) == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts[0] == alone.choices[0].message.content
    assert usage.prompt_tokens == alone.usage.prompt_tokens
    assert usage.completion_tokens == 36


async def test_a_seed_fixes_the_answer_and_another_changes_it(platform):
    texts = [(await chat(platform, max_tokens=16, seed=seed)).choices[0].message.content for seed in (7, 7, 8, -7, -7)]
    assert texts[0] == texts[1]
    assert texts[3] == texts[4]
    assert len(set(texts)) == 3


async def test_without_a_seed_answers_differ(platform):
    texts = {(await chat(platform, max_tokens=32)).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_text_before_it(platform, stream):
    whole = (await chat(platform, max_tokens=60, seed=11)).choices[0].message.content
    stop = whole[30:33]
    expected = whole[: whole.index(stop)]
    if stream:
        chunks = await chunks_of(platform, max_tokens=60, seed=11, stop=[stop, "#never#"])
        text, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = await chat(platform, max_tokens=60, seed=11, stop=stop)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len(expected) + 3
    assert text == expected
    assert reason == "stop"
    await platform.until(lambda: platform.num_running() == 0)


async def test_the_stop_string_is_kept_if_asked_for(platform):
    whole = (await chat(platform, max_tokens=60, seed=11)).choices[0].message.content
    stop = whole[30:33]
    answer = await chat(platform, max_tokens=60, seed=11, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert answer.choices[0].message.content == whole[: whole.index(stop) + 3]


async def test_a_stop_token_is_counted_and_not_shown(platform):
    whole = await chat(platform, max_tokens=40, seed=4, logprobs=True)
    entries = whole.choices[0].logprobs.content
    stop = platform.app.models.served()[0].tokenizer.encode(entries[10].token)[0]
    first = next(i for i, entry in enumerate(entries) if entry.token == entries[10].token)
    answer = await chat(platform, max_tokens=40, seed=4, logprobs=True, extra_body={"stop_token_ids": [stop]})
    assert answer.choices[0].message.content == whole.choices[0].message.content[:first]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == first + 1
    assert len(answer.choices[0].logprobs.content) == first


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_line_up_with_the_text(platform, stream):
    options = {"max_tokens": 10, "seed": 6, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = await chunks_of(platform, **options)
        text = text_of(chunks)
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        choice = (await chat(platform, **options)).choices[0]
        text, entries = choice.message.content, choice.logprobs.content
    assert "".join(entry.token for entry in entries) == text
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    assert all(len(entry.top_logprobs) == 3 and entry.logprob < 0 for entry in entries)


async def test_logprobs_do_not_tell_of_tokens_behind_a_stop_string(platform):
    whole = (await chat(platform, max_tokens=60, seed=11)).choices[0].message.content
    answer = await chat(platform, max_tokens=60, seed=11, stop=whole[30:33], logprobs=True)
    choice = answer.choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


@pytest.mark.parametrize("asked", [True, False, None])
async def test_the_usage_chunk_comes_only_if_it_was_asked_for(platform, asked):
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    async with platform.http() as http:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "stream": True, **options}
        text = (await http.post("/v1/chat/completions", json=body)).text
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert all(('"usage":null' in event) == bool(asked) for event in events[:-2])
    assert ('"choices":[],"usage":{' in events[-2]) == bool(asked)
    assert text.index(": server-timing ") < text.index("data: [DONE]")


@pytest.mark.parametrize("prompt", ["One prompt", ["Two", "prompts"], [72, 105], [[72, 105], [79, 107, 33]]])
async def test_completions_take_every_form_of_prompt(platform, prompt):
    async with platform.client() as client:
        answer = await client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=6, seed=1)
    num_prompts = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [c.index for c in answer.choices] == list(range(2 * num_prompts))
    assert all(len(c.text) == 6 for c in answer.choices)
    assert answer.usage.completion_tokens == 12 * num_prompts


async def test_completions_stream_what_they_answer(platform):
    async with platform.client() as client:
        options = {"model": "tiny", "prompt": ["Ab", "Cd"], "max_tokens": 8, "seed": 9, "echo": True}
        answer = await client.completions.create(**options)
        texts = ["", ""]
        async for chunk in await client.completions.create(**options, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in answer.choices]
    assert [text[:2] for text in texts] == ["Ab", "Cd"]
    assert [len(text) for text in texts] == [10, 10]


async def test_completions_default_to_sixteen_tokens(platform):
    async with platform.client() as client:
        answer = await client.completions.create(model="tiny", prompt="Hello")
    assert answer.usage.completion_tokens == 16


async def test_chat_defaults_to_the_rest_of_the_context(launch, fake_config):
    platform = await launch({"w0": fake_config(max_model_len=128)})
    answer = await chat(platform)
    assert answer.usage.total_tokens == 128
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_legacy_logprobs_are_columns(platform, stream):
    async with platform.client() as client:
        options = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "logprobs": 2, "seed": 1}
        if stream:
            parts = [c.choices[0].logprobs async for c in await client.completions.create(**options, stream=True)]
            columns = [part for part in parts if part is not None]
        else:
            columns = [(await client.completions.create(**options)).choices[0].logprobs]
    tokens = [token for part in columns for token in part.tokens]
    assert len(tokens) == 6
    assert [offset for part in columns for offset in part.text_offset] == list(range(6))
    assert all(len(top) == 2 for part in columns for top in part.top_logprobs)


async def test_max_completion_tokens_wins_over_max_tokens(platform):
    answer = await chat(platform, max_tokens=50, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


async def test_models_are_listed_and_found(platform):
    async with platform.client() as client:
        listed = [model async for model in client.models.list()]
        one = await client.models.retrieve("tiny")
        pinned = await client.models.retrieve("tiny@abcdef012345")
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("tinny")
    assert [model.id for model in listed] == ["tiny"]
    assert one.created == 1_700_000_000
    assert pinned.id == "tiny@abcdef012345"
    assert raised.value.code == "model_not_found"
    assert "Did you mean 'tiny'?" in raised.value.message


async def test_a_name_means_the_newest_version_and_can_be_pinned(launch, fake_config):
    platform = await launch({"old": fake_config(version="111111111111"), "new": fake_config(version="222222222222")})
    await platform.until(lambda: len(platform.app.models.served()) == 2)
    platform.models.created_at.update({"222222222222": 1.8e9})
    platform.app.models._loaded.clear()
    platform.app.models.refresh()
    await platform.until(lambda: len(platform.app.models.served()) == 2)
    async with platform.client() as client:
        prints = []
        for model in ("tiny", "tiny@111111111111"):
            answer = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2)
            prints.append(answer.system_fingerprint)
        ids = [model.id async for model in client.models.list()]
    assert prints == ["fp_222222222222", "fp_111111111111"]
    assert ids == ["tiny", "tiny@222222222222", "tiny@111111111111"]


async def test_a_model_name_may_hold_a_slash(launch, fake_config):
    platform = await launch({"w0": fake_config(model="org/tiny")})
    async with platform.client() as client:
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
        answer = await client.chat.completions.create(model="org/tiny", messages=MESSAGES, max_tokens=2)
    assert answer.model == "org/tiny"
