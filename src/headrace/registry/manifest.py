"""What a model version consists of: the list of its files by content, and where it came from.

A manifest holds no name and no time, so the same content always gives the same bytes, and the bytes name the version.
"""

import hashlib
import re
from pathlib import PurePosixPath

import msgspec

from headrace.core.errors import ModelFormatError
from headrace.core.ids import Digest, VersionId

FORMAT = 1
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VERSION_CHARS = 12


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the model directory."""

    path: str
    """Relative, ``/``-separated."""
    digest: Digest
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a version. Use :func:`make` to build one: it fixes the order."""

    format: int
    files: tuple[ManifestFile, ...]
    """By path."""
    source: str
    """What was imported, for people: it does not depend on where the importing machine kept it."""
    licence: str = ""
    """As the source states it, e.g. ``apache-2.0``; empty if it states none."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def make(files: list[ManifestFile], *, source: str, licence: str = "") -> Manifest:
    """A manifest of ``files``, in canonical order.

    Raises:
        ModelFormatError: a path is absolute, has ``..``, or occurs twice.
    """
    manifest = Manifest(FORMAT, tuple(sorted(files, key=lambda file: file.path)), source, licence)
    _check(manifest)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes: JSON with sorted keys, no spaces."""
    return msgspec.json.encode(manifest, order="sorted")


def decode(data: bytes) -> Manifest:
    """Read a manifest back.

    Raises:
        ModelFormatError: it is damaged, or of a later format than this program knows.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ModelFormatError(f"the manifest has {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ModelFormatError(f"the manifest cannot be read: {error}") from error
    _check(manifest)
    return manifest


def digest(data: bytes) -> Digest:
    """The content address of ``data``."""
    return Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")


def version_id(manifest: Manifest) -> VersionId:
    """The version that this manifest names."""
    return VersionId(hex_of(digest(encode(manifest)))[:_VERSION_CHARS])


def hex_of(address: Digest) -> str:
    """The 64 hex digits of a content address.

    Raises:
        ModelFormatError: it is not one.
    """
    if not _DIGEST.fullmatch(address):
        raise ModelFormatError(f"{address!r} is not a content address of the form sha256:<64 hex digits>")
    return address.removeprefix("sha256:")


def blob_key(address: Digest) -> str:
    """Where a file with this content lies in the blob store."""
    return f"blobs/sha256/{hex_of(address)}"


def manifest_key(address: Digest) -> str:
    """Where a manifest with this content lies in the blob store."""
    return f"manifests/{hex_of(address)}"


def _check(manifest: Manifest) -> None:
    if manifest.format != FORMAT:
        raise ModelFormatError(f"the manifest has format {manifest.format}; this program reads format {FORMAT}")
    paths = [file.path for file in manifest.files]
    if len(set(paths)) != len(paths):
        raise ModelFormatError("the manifest lists a path twice")
    for file in manifest.files:
        path = PurePosixPath(file.path)
        if not file.path or path.is_absolute() or ".." in path.parts or str(path) != file.path or "\0" in file.path:
            raise ModelFormatError(f"the manifest lists {file.path!r}, which is not a plain relative path")
        hex_of(file.digest)
        if file.num_bytes < 0:
            raise ModelFormatError(f"the manifest gives {file.path!r} {file.num_bytes} bytes")


def damaged(what: str, address: Digest) -> ModelFormatError:
    """The error for stored bytes that do not have the hash they are known by."""
    return ModelFormatError(
        f"{what} is damaged in the blob store: it does not hash to {address}; "
        f"delete that object and import the model again"
    )
