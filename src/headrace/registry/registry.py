"""Models by name and version: import them, find them, and put them on local disk.

Files lie in the blob store by content, a manifest lists them, and the catalog gives the manifest a name. The catalog's
row is written last: a version that can be found is complete.
"""

import asyncio
import contextlib
import difflib
import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import ConfigError, Conflict, InvalidRequest, ModelNotFound
from headrace.core.ids import Digest, ModelName, VersionId
from headrace.ports.blobs import Blobs
from headrace.ports.store import Catalog, ModelVersion
from headrace.registry import manifest as manifests
from headrace.registry.manifest import Manifest, ManifestFile
from headrace.registry.materialize import materialize
from headrace.registry.prepared import Prepared
from headrace.registry.progress import Progress, silent

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HASH_BYTES = 1024 * 1024
_NEAR = 0.6


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome of an import."""

    version: ModelVersion
    created: bool
    """False if this very version was there already: nothing changed."""


class Registry:
    """What may be served, over a catalog of names and a store of bytes."""

    def __init__(
        self, catalog: Catalog, blobs: Blobs, *, clock: Clock | None = None, scratch_dir: Path | None = None
    ) -> None:
        """``scratch_dir`` holds conversions while they run (the system's temporary directory if None)."""
        self._catalog = catalog
        self._blobs = blobs
        self._clock = clock or SystemClock()
        self._scratch_dir = scratch_dir

    async def import_model(self, source: str, name: str | None = None, progress: Progress | None = None) -> Imported:
        """Check, convert where needed, store and record a model.

        ``source`` is a directory in Hugging Face layout, a ``.gguf`` file, ``hf:OWNER/MODEL[@REVISION]`` or ``demo``.
        ``name`` defaults to one made from the source.

        Raises:
            InvalidRequest: ``name`` is malformed, or ``source`` of no known form.
            NotFound: ``source`` does not exist.
            ModelFormatError: it is not a model that can be imported; the message says why.
            Unavailable: a hub, the database or the blob store cannot be reached.
            ConfigError: the packages of the ``import`` extra are not installed.
        """
        # Importing needs packages of the `import` extra; a gateway or worker, which only resolves, runs without them.
        try:
            from headrace.registry.importer import prepare
        except ModuleNotFoundError as error:
            raise ConfigError(f"importing models needs {error.name}: pip install 'headrace[import]'") from error

        report = progress or silent
        if name is not None:
            _check_name(name)
        if self._scratch_dir is not None:
            self._scratch_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="headrace-import-", dir=self._scratch_dir) as scratch:
            prepared = await asyncio.to_thread(prepare, source, Path(scratch), report)
            manifest = await self._store(prepared, report)
        return await self._record(_check_name(name or prepared.name), source, manifest)

    async def resolve(self, reference: str) -> ModelVersion:
        """The version that ``name`` (its newest) or ``name@version`` means now.

        Raises:
            ModelNotFound: there is none; the message lists names that are near.
            StoreUnavailable: the database cannot be reached.
        """
        name, separator, version = reference.partition("@")
        found = None
        if _NAME.fullmatch(name) and (version or not separator):
            found = await self._catalog.find_version(ModelName(name), VersionId(version) if separator else None)
        if found is None:
            raise ModelNotFound(await self._not_found(reference, name), param="model")
        return found

    async def list(self) -> list[ModelVersion]:
        """All versions, by model name and then newest first."""
        return await self._catalog.list_versions()

    async def manifest(self, version: ModelVersion) -> Manifest:
        """What ``version`` consists of.

        Raises:
            ModelFormatError: the stored manifest is damaged.
            NotFound: the blob store lost it.
        """
        data = await self._blobs.get(manifests.manifest_key(version.manifest))
        if manifests.digest(data) != version.manifest:
            raise manifests.damaged(f"the manifest of {version.model}@{version.version}", version.manifest)
        return manifests.decode(data)

    async def materialize(
        self,
        version: ModelVersion,
        cache_dir: Path,
        progress: Progress | None = None,
        *,
        only: Callable[[str], bool] | None = None,
    ) -> Path:
        """The model directory of ``version`` under ``cache_dir``, its files verified against their hashes.

        Safe when several processes ask for it at once; one that is there already is used as it is. ``only`` selects
        files by path (a gateway needs no weights).

        Raises:
            ModelFormatError: a stored file is damaged.
            NotFound: the blob store lost a file.
            StoreUnavailable: the blob store cannot be reached.
        """
        manifest = await self.manifest(version)
        files = [file for file in manifest.files if only is None or only(file.path)]
        name = version.version
        if only is not None:
            chosen = hashlib.sha256("\n".join(file.path for file in files).encode()).hexdigest()[:8]
            name = VersionId(f"{version.version}-{chosen}")
        return await materialize(self._blobs, files, cache_dir / name, progress or silent)

    async def _store(self, prepared: Prepared, report: Progress) -> Manifest:
        files: list[ManifestFile] = []
        total = sum(path.stat().st_size for path in prepared.files.values())
        done = 0
        for name, path in prepared.files.items():
            report("store", done, total)
            address, num_bytes = await asyncio.to_thread(_hash, path)
            if await self._blobs.size(manifests.blob_key(address)) is None:
                # A conflict: another import stored the same content meanwhile.
                with contextlib.suppress(Conflict):
                    await self._blobs.put_file(manifests.blob_key(address), path)
            files.append(ManifestFile(name, address, num_bytes))
            done += num_bytes
            report("store", done, total)
        return manifests.make(files, source=prepared.source, licence=prepared.licence)

    async def _record(self, name: str, source: str, manifest: Manifest) -> Imported:
        data = manifests.encode(manifest)
        address = manifests.digest(data)
        # A conflict: the same content was imported before, perhaps under another name.
        with contextlib.suppress(Conflict):
            await self._blobs.put(manifests.manifest_key(address), data)
        version = ModelVersion(
            model=ModelName(name),
            version=manifests.version_id(manifest),
            manifest=address,
            num_bytes=manifest.num_bytes,
            source=source,
            created_at=self._clock.wall(),
        )
        if await self._catalog.add_version(version):
            return Imported(version, created=True)
        return Imported(await self.resolve(f"{version.model}@{version.version}"), created=False)

    async def _not_found(self, reference: str, name: str) -> str:
        versions = await self._catalog.list_versions()
        known = list(dict.fromkeys(version.model for version in versions))
        if name in known:
            have = ", ".join(version.version for version in versions if version.model == name)
            return f"model {name!r} has no version {reference.partition('@')[2]!r}; it has {have}"
        near = near_names(name, known)
        if near:
            return f"there is no model {reference!r}; did you mean {' or '.join(map(repr, near))}?"
        if known:
            return f"there is no model {reference!r}; known models: {', '.join(known[:10])}"
        return f"there is no model {reference!r}; none was imported yet (headrace model import)"


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Up to three of ``known`` that somebody who wrote ``name`` may have meant, likeliest first.

    Case does not count, and names are also compared as beginnings: ``smolm`` is near ``smollm2-135m-instruct``.
    """

    def likeness(candidate: str) -> float:
        whole, start = candidate.lower(), candidate.lower()[: len(name)]
        return max(difflib.SequenceMatcher(None, name.lower(), text).ratio() for text in (whole, start))

    scored = sorted(((likeness(candidate), candidate) for candidate in known), key=lambda pair: (-pair[0], pair[1]))
    return [candidate for score, candidate in scored[:3] if name and score >= _NEAR]


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a model name; use 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-', "
            "and start with a letter or digit",
            param="model",
        )
    return name


def _hash(path: Path) -> tuple[Digest, int]:
    hasher = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BYTES):
            hasher.update(chunk)
            num_bytes += len(chunk)
    return Digest(f"sha256:{hasher.hexdigest()}"), num_bytes
