"""Blobs as files under one directory.

Every object is written to a private file first, synced, and then given its name in one step: a hard link where the
name must be new (the file system decides who wins), a rename where it may replace. Directories are opened one path
segment at a time without following symbolic links, so a link planted inside the root leads nowhere.
"""

import asyncio
import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from headrace.core.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable

_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,255}")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")
_MAX_KEY_CHARS = 1024
_SCRATCH = "~scratch"
"""Where objects are written before they have their name. ``~`` cannot occur in a key."""
_COPY_BYTES = 1024 * 1024
Strings = list[str]
"""``list`` means a method inside the class below."""
_OBJECT_MODE = 0o444
"""Objects are immutable, and :meth:`FileBlobs.fetch` shares their storage: nobody may write to them."""


class FileBlobs:
    """``ports.blobs.Blobs`` on a local or shared POSIX file system that has hard links.

    A key cannot be both an object and a directory of others (``a`` and ``a/b``); the second is refused as malformed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, key: str, data: bytes, *, overwrite: bool = False) -> None:
        def fill(file: BinaryIO) -> None:
            file.write(data)

        await asyncio.to_thread(self._write, key, fill, overwrite=overwrite)

    async def put_file(self, key: str, path: Path, *, overwrite: bool = False) -> None:
        def fill(file: BinaryIO) -> None:
            with path.open("rb") as source:
                shutil.copyfileobj(source, file, _COPY_BYTES)

        await asyncio.to_thread(self._write, key, fill, overwrite=overwrite)

    async def get(self, key: str) -> bytes:
        def read() -> bytes:
            with self._open(key) as file:
                return file.read()

        return await asyncio.to_thread(read)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if start < 0 or length < 0:
            raise InvalidRequest(f"the range {start}+{length} of {key!r} is negative")

        def read() -> bytes:
            with self._open(key) as file:
                file.seek(start)
                return file.read(length)

        return await asyncio.to_thread(read)

    async def size(self, key: str) -> int | None:
        def measure() -> int | None:
            try:
                with self._open(key) as file:
                    return os.fstat(file.fileno()).st_size
            except NotFound:
                return None

        return await asyncio.to_thread(measure)

    async def list(self, prefix: str = "") -> AsyncIterator[str]:
        if not _PREFIX.fullmatch(prefix) or any(part in ("", ".", "..") for part in prefix.split("/")[:-1]):
            raise InvalidRequest(f"{prefix!r} cannot start a blob key: {_RULE}")
        pending = [prefix.rpartition("/")[0]]
        while pending:
            folder = pending.pop()
            keys, folders = await asyncio.to_thread(self._scan, folder)
            for key in keys:
                if key.startswith(prefix):
                    yield key
            pending += [name for name in folders if name.startswith(prefix) or prefix.startswith(name + "/")]

    async def delete(self, key: str) -> None:
        def remove() -> None:
            parts = _split(key)
            with contextlib.suppress(FileNotFoundError), _translated(key), self._folder(parts[:-1]) as folder:
                os.unlink(parts[-1], dir_fd=folder)
                os.fsync(folder)

        await asyncio.to_thread(remove)

    async def fetch(self, key: str, path: Path) -> None:
        await asyncio.to_thread(self._fetch, key, path)

    def _write(self, key: str, fill: Callable[[BinaryIO], None], *, overwrite: bool) -> None:
        parts = _split(key)
        scratch_name = secrets.token_hex(16)
        with _translated(key, writing=True), self._folder([_SCRATCH], create=True) as scratch:
            descriptor = os.open(scratch_name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=scratch)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    fill(file)
                    file.flush()
                    os.fchmod(descriptor, _OBJECT_MODE)
                    os.fsync(descriptor)
                with self._folder(parts[:-1], create=True) as folder:
                    if overwrite:
                        os.rename(scratch_name, parts[-1], src_dir_fd=scratch, dst_dir_fd=folder)
                    else:
                        os.link(scratch_name, parts[-1], src_dir_fd=scratch, dst_dir_fd=folder, follow_symlinks=False)
                    os.fsync(folder)
            except FileExistsError as error:
                raise Conflict(f"the blob {key!r} exists already") from error
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(scratch_name, dir_fd=scratch)

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[BinaryIO]:
        parts = _split(key)
        try:
            with _translated(key):
                with self._folder(parts[:-1]) as folder:
                    descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                with os.fdopen(descriptor, "rb") as file:
                    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                        raise FileNotFoundError(key)
                    yield file
        except FileNotFoundError as error:
            raise NotFound(f"there is no blob {key!r}") from error

    def _fetch(self, key: str, path: Path) -> None:
        parts = _split(key)
        waiting = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with self._open(key) as source, _translated(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                try:
                    with self._folder(parts[:-1]) as folder:
                        os.link(parts[-1], waiting, src_dir_fd=folder, follow_symlinks=False)
                except OSError as error:
                    # Another file system, a link limit, or a system that forbids linking to others' files.
                    if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.EOPNOTSUPP):
                        raise
                    _copy(source, waiting)
                waiting.replace(path)
            finally:
                # Renaming onto another link of the same file does nothing, and leaves the waiting name.
                waiting.unlink(missing_ok=True)

    def _scan(self, folder: str) -> tuple[Strings, Strings]:
        keys: Strings = []
        folders: Strings = []
        base = f"{folder}/" if folder else ""
        try:
            with (
                _translated(folder),
                self._folder(folder.split("/") if folder else []) as descriptor,
                os.scandir(descriptor) as entries,
            ):
                for entry in entries:
                    if not _SEGMENT.fullmatch(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(base + entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        keys.append(base + entry.name)
        except FileNotFoundError:
            pass  # nothing was put there yet, or it is an object itself
        return keys, folders

    @contextlib.contextmanager
    def _folder(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """A descriptor of a directory under the root; symbolic links below the root are not followed."""
        if create:
            self._root.mkdir(parents=True, exist_ok=True)
        current = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts:
                try:
                    below = _open_folder(part, current)
                except FileNotFoundError:
                    if not create:
                        raise
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=current)
                        os.fsync(current)
                    below = _open_folder(part, current)
                os.close(current)
                current = below
            yield current
        finally:
            os.close(current)


_RULE = "keys are '/'-separated names of A-Z, a-z, 0-9, '.', '_', '-', and no name is '.' or '..'"


def _split(key: str) -> list[str]:
    parts = key.split("/")
    if len(key) > _MAX_KEY_CHARS or not all(_SEGMENT.fullmatch(part) and part not in (".", "..") for part in parts):
        raise InvalidRequest(f"{key[:100]!r} is not a blob key: {_RULE}")
    return parts


def _open_folder(name: str, parent: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _copy(source: BinaryIO, path: Path) -> None:
    with path.open("xb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
        target.flush()
        os.fchmod(target.fileno(), _OBJECT_MODE)
        os.fsync(target.fileno())


@contextlib.contextmanager
def _translated(key: str, *, writing: bool = False) -> Iterator[None]:
    """Foreign errors become ours here. ``FileNotFoundError`` passes: what it means depends on the call."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        # ENOTDIR is also what the system says of a symbolic link where a directory should be.
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            if not writing:
                raise FileNotFoundError(key) from error
            raise InvalidRequest(
                f"{key!r} cannot be a blob key here: it leads through an object or a symbolic link, or is a folder"
            ) from error
        raise StoreUnavailable(f"the blob store cannot serve {key!r}: {error.strerror}") from error
