"""What every blob store does; the suite runs against each adapter."""

import asyncio
from pathlib import Path

import pytest

from headrace.adapters.blobs.files import FileBlobs
from headrace.core.errors import Conflict, InvalidRequest, NotFound
from headrace.ports.blobs import Blobs

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "../a",
    "a/.",
    "a b",
    "a\0b",
    "ä",
    "a\\b",
    "~a",
    "a" * 1025,
    "a\n",
]


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return FileBlobs(tmp_path / "blobs")


async def keys(blobs: Blobs, prefix: str = "") -> list[str]:
    return sorted([key async for key in blobs.list(prefix)])


@pytest.mark.parametrize("key", ["a", "a/b/c.json", "blobs/sha256/00ff", "a.b_c-D", "...", "a/.hidden"])
async def test_an_object_comes_back_as_it_was_put(blobs: Blobs, key: str) -> None:
    data = bytes(range(256)) * 10
    await blobs.put(key, data)
    assert await blobs.get(key) == data
    assert await blobs.size(key) == len(data)
    assert await keys(blobs) == [key]


async def test_an_empty_object_exists(blobs: Blobs) -> None:
    await blobs.put("empty", b"")
    assert await blobs.get("empty") == b""
    assert await blobs.size("empty") == 0


async def test_an_object_is_put_from_a_file(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 3_000_000)
    await blobs.put_file("big", source)
    source.write_bytes(b"changed")
    assert await blobs.get("big") == b"x" * 3_000_000


async def test_putting_again_conflicts_and_changes_nothing(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"second")
    await blobs.put("key", b"first")
    with pytest.raises(Conflict, match="key"):
        await blobs.put("key", b"second")
    with pytest.raises(Conflict, match="key"):
        await blobs.put_file("key", source)
    assert await blobs.get("key") == b"first"


async def test_overwriting_replaces(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"third")
    await blobs.put("key", b"first", overwrite=True)
    await blobs.put("key", b"second", overwrite=True)
    assert await blobs.get("key") == b"second"
    await blobs.put_file("key", source, overwrite=True)
    assert await blobs.get("key") == b"third"


async def test_of_racing_writers_exactly_one_wins_and_its_bytes_stay(blobs: Blobs) -> None:
    contents = [bytes([number]) * 50_000 for number in range(16)]
    outcomes = await asyncio.gather(*(blobs.put("race", data) for data in contents), return_exceptions=True)
    assert outcomes.count(None) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 15
    assert await blobs.get("race") == contents[outcomes.index(None)]
    assert await keys(blobs) == ["race"]


async def test_readers_never_see_half_an_object(blobs: Blobs) -> None:
    contents = [bytes([number]) * 200_000 for number in range(8)]
    await blobs.put("key", contents[0])

    async def read() -> bytes:
        return await blobs.get("key")

    results = await asyncio.gather(
        *(blobs.put("key", data, overwrite=True) for data in contents), *(read() for _ in range(32))
    )
    assert all(result in contents for result in results if result is not None)


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 4, b"0123"), (3, 2, b"34"), (8, 100, b"89"), (10, 5, b""), (99, 1, b""), (2, 0, b"")],
)
async def test_a_range_is_cut_at_the_end(blobs: Blobs, start: int, length: int, expected: bytes) -> None:
    await blobs.put("key", b"0123456789")
    assert await blobs.get_range("key", start, length) == expected


async def test_what_is_not_there_is_said(blobs: Blobs, tmp_path: Path) -> None:
    await blobs.put("a/b", b"")
    for key in ("missing", "a/missing", "missing/b", "a/b/missing"):
        with pytest.raises(NotFound, match="missing"):
            await blobs.get(key)
        with pytest.raises(NotFound, match="missing"):
            await blobs.get_range(key, 0, 1)
        with pytest.raises(NotFound, match="missing"):
            await blobs.fetch(key, tmp_path / "target")
        assert await blobs.size(key) is None
        await blobs.delete(key)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "ab", "nothing", "a/b/c/d"])
async def test_listing_gives_the_keys_that_start_with_the_prefix(blobs: Blobs, prefix: str) -> None:
    every = ["a/b/c", "a/b/d", "a/bb", "ab", "abc/d", "z"]
    for key in every:
        await blobs.put(key, b"")
    assert await keys(blobs, prefix) == [key for key in every if key.startswith(prefix)]


async def test_an_empty_store_lists_nothing(blobs: Blobs) -> None:
    assert await keys(blobs) == []


async def test_a_deleted_object_is_gone_and_its_key_free(blobs: Blobs) -> None:
    await blobs.put("key", b"first")
    await blobs.delete("key")
    await blobs.delete("key")
    assert await blobs.size("key") is None
    await blobs.put("key", b"second")
    assert await blobs.get("key") == b"second"


async def test_fetching_gives_a_file_and_replaces_what_was_there(blobs: Blobs, tmp_path: Path) -> None:
    await blobs.put("key", b"data")
    target = tmp_path / "target"
    target.write_bytes(b"old")
    await blobs.fetch("key", target)
    await blobs.fetch("key", target)
    assert target.read_bytes() == b"data"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["target"]


async def test_a_fetched_file_survives_the_deletion_of_its_object(blobs: Blobs, tmp_path: Path) -> None:
    await blobs.put("key", b"data")
    await blobs.fetch("key", tmp_path / "target")
    await blobs.delete("key")
    assert (tmp_path / "target").read_bytes() == b"data"


@pytest.mark.parametrize("key", BAD_KEYS)
async def test_a_malformed_key_is_refused_everywhere(blobs: Blobs, tmp_path: Path, key: str) -> None:
    (tmp_path / "source").write_bytes(b"")
    for attempt in (
        blobs.put(key, b""),
        blobs.put_file(key, tmp_path / "source"),
        blobs.get(key),
        blobs.get_range(key, 0, 1),
        blobs.size(key),
        blobs.delete(key),
        blobs.fetch(key, tmp_path / "target"),
    ):
        with pytest.raises(InvalidRequest, match="blob key"):
            await attempt


@pytest.mark.parametrize("prefix", ["../", "/", "a/../", "a//", "~", "a b", "a\0"])
async def test_a_malformed_prefix_is_refused(blobs: Blobs, prefix: str) -> None:
    with pytest.raises(InvalidRequest):
        await keys(blobs, prefix)
