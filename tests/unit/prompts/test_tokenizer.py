import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest, ModelFormatError, RequestTooLarge
from headrace.prompts.tokenizer import MAX_INLINE_CHARS, Tokenizer

ids = st.lists(st.integers(0, 600), max_size=40)
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(ids, st.booleans())
def test_byte_level_decoding_is_the_librarys(
    byte_level: Tokenizer, raw_byte_level: tokenizers.Tokenizer, token_ids: list[int], skip: bool
) -> None:
    expected = raw_byte_level.decode(token_ids, skip_special_tokens=skip)
    assert byte_level.decode(token_ids, skip_special_tokens=skip) == expected


@given(st.lists(st.sampled_from(["hello", "日本", "🙂", " x", "naïve☃", "<tool call>", "<|end|>", "\x00", "߿"])))
def test_byte_fallback_decoding_is_the_librarys_for_whole_characters(
    byte_fallback: Tokenizer, raw_byte_fallback: tokenizers.Tokenizer, texts: list[str]
) -> None:
    token_ids = [token_id for text in texts for token_id in byte_fallback.encode(text)]
    for skip in (True, False):
        expected = raw_byte_fallback.decode(token_ids, skip_special_tokens=skip)
        assert byte_fallback.decode(token_ids, skip_special_tokens=skip) == expected


def test_byte_fallback_replaces_only_the_broken_bytes(byte_fallback: Tokenizer) -> None:
    # The library gives up the whole run of byte tokens, here the whole character too.
    run = [byte_fallback.token_id(f"<0x{byte:02X}>") for byte in b"\xff" + "語".encode()]
    assert byte_fallback.decode([i for i in run if i is not None]) == "�語"


@given(plain_text)
@example("<tool call>naïve☃<|end|>")
def test_any_text_survives_the_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


@given(plain_text)
def test_token_bytes_joined_are_the_text(byte_level: Tokenizer, text: str) -> None:
    assert b"".join(byte_level.token_bytes(i) for i in byte_level.encode(text)) == text.encode()


def test_tokens_as_people_read_them(byte_level: Tokenizer, byte_fallback: Tokenizer, word_piece: Tokenizer) -> None:
    world = byte_level.encode("hello world")[-1]
    assert byte_level.token_text(world).endswith("d")
    assert byte_level.token_text(byte_level.encode("<|end|>")[0]) == "<|end|>"
    assert byte_level.token_bytes(10**6) == b""
    newline = byte_fallback.token_id("<0x0A>")
    assert newline is not None
    assert byte_fallback.token_bytes(newline) == b"\n"
    assert word_piece.token_bytes(word_piece.encode("hello")[0]).decode() in "hello"


def test_load_forgets_truncation_and_padding(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    token_ids = tokenizer.encode("hello world " * 20)
    assert len(token_ids) > 9
    assert tokenizer.decode(token_ids) == "hello world " * 20
    assert len(tokenizer.encode("x")) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [5]}}, {5, 7}),
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, {1}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|end|>", "special": True}}}, {1}),
        ({"tokenizer_config.json": {"eos_token": "no such token"}}, set()),
    ],
)
def test_eos_ids_come_from_all_configurations(model_dir: Path, files: dict[str, Any], expected: set[int]) -> None:
    for name, content in files.items():
        (model_dir / name).write_text(json.dumps(content))
    assert Tokenizer.load(model_dir).eos_token_ids == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_damaged_files_are_named(model_dir: Path, name: str, content: bytes) -> None:
    (model_dir / name).write_bytes(content)
    with pytest.raises(ModelFormatError, match=name):
        Tokenizer.load(model_dir)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("a\ud800")


def test_texts_beyond_the_limit_are_refused(raw_byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(raw_byte_level.to_str().encode(), max_chars=10)
    assert tokenizer.encode("x" * 10)
    with pytest.raises(RequestTooLarge):
        tokenizer.encode("x" * 11)


@pytest.mark.parametrize("num_chars", [1, MAX_INLINE_CHARS, MAX_INLINE_CHARS + 1, 20_000])
async def test_encoding_elsewhere_gives_the_same_ids(byte_level: Tokenizer, num_chars: int) -> None:
    text = ("hello 日本 " * num_chars)[:num_chars]
    assert await byte_level.encode_async(text) == byte_level.encode(text)


async def test_the_event_loop_runs_while_a_long_text_is_encoded(byte_level: Tokenizer) -> None:
    work = asyncio.create_task(byte_level.encode_async("hello 日本 " * 20_000))
    num_turns = 0
    while not work.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 100


async def test_a_cancelled_encode_leaves_nothing_pending(byte_level: Tokenizer) -> None:
    tasks = [asyncio.create_task(byte_level.encode_async("hello " * 2000)) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5):
        while byte_level.num_pending:
            await asyncio.sleep(0.001)


def test_many_threads_at_once(byte_level: Tokenizer) -> None:
    expected = byte_level.encode("hello world " * 100)
    results: list[bool] = []

    def work() -> None:
        results.append(all(byte_level.encode("hello world " * 100) == expected for _ in range(20)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 6


async def test_a_closed_tokenizer_ends_its_threads(raw_byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(raw_byte_level.to_str().encode())
    await tokenizer.encode_async("x" * (MAX_INLINE_CHARS + 1))
    tokenizer.close()
    tokenizer.close()
    assert tokenizer.encode("hello")


def test_loading_in_one_thread_leaves_the_parsed_copy_to_the_thread_that_encodes(
    tmp_path: Path, raw_byte_level: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    loaded: list[Tokenizer] = []
    thread = threading.Thread(target=lambda: loaded.append(Tokenizer.load(tmp_path)))
    thread.start()
    thread.join()
    # Parsing a large vocabulary takes a tenth of a second, which the event loop must not spend on its first request.
    monkeypatch.setattr(Tokenizer, "_parse", lambda self: pytest.fail("parsed again"))
    assert loaded[0].encode("hello")
    loaded[0].close()


async def test_a_warm_tokenizer_parses_nothing_for_a_long_text(
    raw_byte_level: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(raw_byte_level.to_str().encode())
    tokenizer.warm_up()
    monkeypatch.setattr(Tokenizer, "_parse", lambda self: pytest.fail("parsed again"))
    texts = ["x" * (MAX_INLINE_CHARS + 1)] * 8
    encoded = await asyncio.gather(*(tokenizer.encode_async(text) for text in texts))
    assert all(ids == encoded[0] for ids in encoded)
    tokenizer.close()
