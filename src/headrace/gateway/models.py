"""Which models are served right now, and what the gateway needs to speak for them: tokenizer, template, limits."""

import asyncio
import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from headrace.core.errors import ModelNotFound, Unavailable
from headrace.core.frames import EngineDescription
from headrace.core.ids import ModelName, VersionId
from headrace.ports.store import ModelVersion
from headrace.prompts.isolated import IsolatedTemplate
from headrace.prompts.template import ChatTemplate
from headrace.prompts.tokenizer import Tokenizer

_log = structlog.get_logger("headrace.gateway.models")

_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 30.0
_MAX_REMEMBERED = 1000
_MAX_KEPT = 8
_TEXT_FILES = frozenset({"config.json", "generation_config.json", "special_tokens_map.json"})


class Fleet(Protocol):
    """The part of the dispatcher that says what is served."""

    def served(self) -> list[EngineDescription]: ...


class Models(Protocol):
    """The part of the registry that brings a model's files."""

    async def resolve(self, reference: str) -> ModelVersion: ...

    async def materialize(
        self, version: ModelVersion, cache_dir: Path, *, only: Callable[[str], bool] | None = None
    ) -> Path: ...


class Served(msgspec.Struct, frozen=True):
    """What is loaded once for each version."""

    tokenizer: Tokenizer
    template: IsolatedTemplate | None
    created_at: float


class ServedModel(msgspec.Struct, frozen=True):
    """A version that can be asked now. A request keeps the one it resolved to until it ends."""

    name: ModelName
    version: VersionId
    max_model_len: int
    vocab_size: int
    created_at: float
    tokenizer: Tokenizer
    template: IsolatedTemplate | None


def is_text_file(path: str) -> bool:
    """Whether the gateway needs this file of a model: everything but weights."""
    name = path.rsplit("/", 1)[-1]
    return name in _TEXT_FILES or name.startswith("tokenizer") or name.endswith((".jinja", ".model"))


class ModelDirectory:
    """Follows what the dispatcher says is served, and loads each version's text side off the event loop."""

    def __init__(self, fleet: Fleet, models: Models, cache_dir: Path) -> None:
        self._fleet = fleet
        self._models = models
        self._cache_dir = cache_dir
        self._loaded: dict[tuple[str, VersionId], Served] = {}
        self._loading: dict[tuple[str, VersionId], asyncio.Task[None]] = {}
        self._closed = False
        self._known: dict[str, None] = {}
        """Every ``model`` and ``model@version`` that was served lately: what is away for a moment is no mistake."""
        self._served: dict[str, list[ServedModel]] = {}
        self._any = asyncio.Event()

    async def wait_until_any(self, timeout_s: float) -> bool:
        """Wait until some model can be asked; False if none could in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._any.wait()
        except TimeoutError:
            return False
        return True

    def refresh(self) -> None:
        """Look at what is served now; called whenever that changed."""
        if self._closed:
            return
        described: dict[tuple[str, VersionId], EngineDescription] = {}
        for engine in self._fleet.served():
            key = (engine.model, engine.version)
            other = described.get(key)
            # Workers of one version may be configured differently; a request must fit on any of them.
            if other is None or engine.max_model_len < other.max_model_len:
                described[key] = engine
        for key in described:
            self._remember(key[0], f"{key[0]}@{key[1]}")
            if key not in self._loaded and key not in self._loading:
                self._loading[key] = asyncio.create_task(self._load(key), name=f"load-text-{key[0]}@{key[1]}")
        # Versions come and go with rollouts, and workers with their restarts: the last few are kept for their return.
        # In-flight requests hold what they use; a tokenizer's threads and a template's process end when nobody holds
        # them.
        gone = [key for key in self._loaded if key not in described]
        for key in gone[:-_MAX_KEPT]:
            del self._loaded[key]
        self._served = _by_name(described, self._loaded)
        if self._served:
            self._any.set()
        else:
            self._any.clear()

    def served(self) -> list[ServedModel]:
        """Every version that can be asked now, by name, and newest first within a name."""
        return [model for name in sorted(self._served) for model in self._served[name]]

    def resolve(self, reference: str) -> ServedModel:
        """The version behind ``model`` (its newest that is served) or ``model@version``.

        Raises:
            ModelNotFound: no such model; the message lists near names.
            Unavailable: it was served before, or its tokenizer is still being loaded; or nothing was ever served.
        """
        name, pinned, version = reference.partition("@")
        for model in self._served.get(name, ()):
            if not pinned or version == model.version:
                return model
        if reference in self._known:
            raise Unavailable(f"No worker serves the model '{reference}' right now.", param="model", retry_after_s=2.0)
        if not self._known:
            raise Unavailable("No worker serves any model yet.", param="model", retry_after_s=2.0)
        raise ModelNotFound(
            f"The model '{reference[:128]}' does not exist or is not served.{self._hint(name)}", param="model"
        )

    async def close(self) -> None:
        """Stop loading, and end the tokenizers' threads and the templates' processes."""
        self._closed = True
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loading.clear()
        for loaded in self._loaded.values():
            loaded.tokenizer.close()
            if loaded.template is not None:
                loaded.template.close()

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name[:128], self._served, n=3, cutoff=0.5)
        if near:
            return " Did you mean " + " or ".join(f"'{other}'" for other in near) + "?"
        few = sorted(self._served)[:5]
        return f" Served now: {', '.join(few)}." if few else ""

    def _remember(self, *references: str) -> None:
        for reference in references:
            self._known.pop(reference, None)  # so that it moves to the end
            self._known[reference] = None
        while len(self._known) > _MAX_REMEMBERED:
            self._known.pop(next(iter(self._known)))

    async def _load(self, key: tuple[str, VersionId]) -> None:
        """Load one version's text side, trying again for as long as it is served."""
        delay = _RETRY_FIRST_S
        try:
            while any((engine.model, engine.version) == key for engine in self._fleet.served()):
                try:
                    self._loaded[key] = await self._load_once(key)
                    return
                except Exception as error:  # noqa: BLE001 - whatever is wrong with one model, it is tried again
                    _log.warning("model_text_not_loaded", model=key[0], version=key[1], error=str(error))
                await asyncio.sleep(delay)
                delay = min(delay * 2, _RETRY_MOST_S)
        finally:
            self._loading.pop(key, None)
            if key in self._loaded:
                self.refresh()

    async def _load_once(self, key: tuple[str, VersionId]) -> Served:
        version = await self._models.resolve(f"{key[0]}@{key[1]}")
        directory = await self._models.materialize(version, self._cache_dir, only=is_text_file)
        tokenizer = await asyncio.to_thread(Tokenizer.load, directory)
        await asyncio.to_thread(tokenizer.warm_up)
        template = await asyncio.to_thread(ChatTemplate.load, directory)
        isolated = None if template is None else await asyncio.to_thread(IsolatedTemplate, template)
        return Served(tokenizer, isolated, version.created_at)


def _by_name(
    described: dict[tuple[str, VersionId], EngineDescription], loaded: dict[tuple[str, VersionId], Served]
) -> dict[str, list[ServedModel]]:
    models: dict[str, list[ServedModel]] = {}
    for (name, version), engine in described.items():
        text = loaded.get((name, version))
        if text is not None:
            model = ServedModel(
                name=ModelName(name),
                version=version,
                max_model_len=engine.max_model_len,
                vocab_size=engine.vocab_size,
                created_at=text.created_at,
                tokenizer=text.tokenizer,
                template=text.template,
            )
            models.setdefault(name, []).append(model)
    return {name: _newest_first(versions) for name, versions in models.items()}


def _newest_first(models: Iterable[ServedModel]) -> list[ServedModel]:
    return sorted(models, key=lambda model: (-model.created_at, model.version))
