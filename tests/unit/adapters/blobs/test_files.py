"""What only a directory does: links, modes, and what others may have put into it."""

import os
import stat
from pathlib import Path

import pytest

from headrace.adapters.blobs.files import FileBlobs
from headrace.core.errors import InvalidRequest, NotFound, StoreUnavailable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    (tmp_path / "blobs").mkdir()
    return tmp_path / "blobs"


async def test_a_link_planted_in_the_root_leads_nowhere(root: Path, tmp_path: Path) -> None:
    blobs = FileBlobs(root)
    (root / "folder").symlink_to(tmp_path / "outside")
    (root / "file").symlink_to(tmp_path / "outside/secret")
    for key in ("folder/secret", "file"):
        with pytest.raises(NotFound):
            await blobs.get(key)
        with pytest.raises(NotFound):
            await blobs.fetch(key, tmp_path / "copy")
        assert await blobs.size(key) is None
    with pytest.raises(InvalidRequest, match="symbolic link"):
        await blobs.put("folder/new", b"data")
    await blobs.delete("folder/secret")
    await blobs.put("file", b"own", overwrite=True)
    assert [key async for key in blobs.list()] == ["file"]
    assert (tmp_path / "outside/secret").read_bytes() == b"secret"
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["secret"]


async def test_a_fetched_file_shares_storage_and_nobody_may_write_to_it(root: Path, tmp_path: Path) -> None:
    blobs = FileBlobs(root)
    await blobs.put("a/b", b"data")
    await blobs.fetch("a/b", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_ino == (root / "a/b").stat().st_ino
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o444


async def test_where_links_are_impossible_the_file_is_copied(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = FileBlobs(root)
    await blobs.put("key", b"data")

    def no_links(*args: object, **kwargs: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    await blobs.fetch("key", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"data"
    assert (tmp_path / "copy").stat().st_ino != (root / "key").stat().st_ino


async def test_a_write_that_fails_leaves_nothing_and_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = FileBlobs(root)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            await blobs.put("key", b"data")
    assert [path for path in root.rglob("*") if path.is_file()] == []
    await blobs.put("key", b"data")


async def test_a_key_below_an_object_is_refused_and_a_folder_is_no_object(root: Path) -> None:
    blobs = FileBlobs(root)
    await blobs.put("a/b", b"data")
    with pytest.raises(InvalidRequest, match="leads through an object"):
        await blobs.put("a/b/c", b"data")
    with pytest.raises(NotFound):
        await blobs.get("a")
    assert await blobs.size("a") is None
