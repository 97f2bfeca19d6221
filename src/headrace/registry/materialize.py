"""Put a version's files into a local directory: verified, whole or not at all, once among many processes."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from headrace.core.errors import StoreUnavailable
from headrace.ports.blobs import Blobs
from headrace.registry import manifest as manifests
from headrace.registry.manifest import ManifestFile
from headrace.registry.progress import Progress

_HASH_BYTES = 1024 * 1024
_LOCK_RETRY_S = 0.05


async def materialize(blobs: Blobs, files: Sequence[ManifestFile], target: Path, progress: Progress) -> Path:
    """Fetch ``files`` into the directory ``target`` and return it.

    A directory that holds all files in their right sizes is used as it is. Otherwise the files are fetched and hashed
    in a directory beside it, which is then renamed. One process at a time does this per target; a lock held by a dead
    process is free.

    Raises:
        ModelFormatError: a stored file is damaged.
        NotFound: the blob store lost a file.
        StoreUnavailable: the blob store cannot be reached, or the local disk cannot be written.
    """
    if _complete(files, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        async with _locked(target.with_name(f".{target.name}.lock")):
            if not _complete(files, target):
                await _replace(blobs, files, target, progress)
    except OSError as error:
        raise StoreUnavailable(f"the model cache {str(target.parent)!r} cannot be written: {error.strerror}") from error
    return target


async def _replace(blobs: Blobs, files: Sequence[ManifestFile], target: Path, progress: Progress) -> None:
    # The lock is ours, so directories that wait here were left by a process that died.
    for leftover in target.parent.glob(f".{target.name}.part-*"):
        await asyncio.to_thread(shutil.rmtree, leftover)
    part = target.with_name(f".{target.name}.part-{secrets.token_hex(4)}")
    part.mkdir()
    try:
        await _fetch(blobs, files, part, progress)
        _swap(part, target)
    finally:
        for leftover in target.parent.glob(f".{target.name}.part-*"):
            await asyncio.to_thread(shutil.rmtree, leftover)


def _swap(part: Path, target: Path) -> None:
    if target.exists():
        # A directory cannot be renamed over one that is not empty.
        target.rename(part.with_name(f"{part.name}-old"))
    part.rename(target)


async def _fetch(blobs: Blobs, files: Sequence[ManifestFile], part: Path, progress: Progress) -> None:
    total = sum(file.num_bytes for file in files)
    done = 0
    for file in files:
        path = part / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        await blobs.fetch(manifests.blob_key(file.digest), path)
        done = await asyncio.to_thread(_verify, file, path, done, total, progress)


def _verify(file: ManifestFile, path: Path, done: int, total: int, progress: Progress) -> int:
    hasher = hashlib.sha256()
    with path.open("rb") as opened:
        while chunk := opened.read(_HASH_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    if f"sha256:{hasher.hexdigest()}" != file.digest:
        raise manifests.damaged(file.path, file.digest)
    return done


def _complete(files: Sequence[ManifestFile], target: Path) -> bool:
    try:
        return target.is_dir() and all((target / file.path).stat().st_size == file.num_bytes for file in files)
    except FileNotFoundError:
        return False


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """An advisory lock between processes; the system drops it when its holder dies, so waiting for it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(descriptor)
