"""Models from a Hugging Face hub, through its own client: only files that a model directory may hold are fetched."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

from headrace.core.errors import Forbidden, InvalidRequest, NotFound, Unavailable
from headrace.registry.model_directory import ALLOWED_PATTERNS
from headrace.registry.progress import Progress

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model as it was at one commit, on local disk."""

    directory: Path
    model: str
    commit: str

    @property
    def name(self) -> str:
        """What to call it here: the hub's name without the owner, in lower case."""
        return self.model.rpartition("/")[2].lower()


def fetch(reference: str, progress: Progress) -> Snapshot:
    """Bring ``OWNER/MODEL[@REVISION]`` into the client's own cache; what is there already is not fetched again.

    The client's environment variables apply (``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``).

    Raises:
        InvalidRequest: ``reference`` has another form.
        NotFound: the hub has no such model or revision.
        Forbidden: its owner has not given access.
        Unavailable: the hub cannot be reached, and the cache does not hold the model.
    """
    model, _, revision = reference.partition("@")
    if not _MODEL.fullmatch(model):
        raise InvalidRequest(f"{reference!r} is not of the form OWNER/MODEL[@REVISION]")
    try:
        directory = huggingface_hub.snapshot_download(
            model,
            revision=revision or None,
            allow_patterns=list(ALLOWED_PATTERNS),
            tqdm_class=_reporting(progress),
        )
    except GatedRepoError as error:
        raise Forbidden(f"{model} is gated: ask its owner for access on the hub, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise NotFound(f"the hub has {model}, but not its revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise NotFound(f"the hub has no model {model!r}; if it is private, set HF_TOKEN") from error
    except HFValidationError as error:
        raise InvalidRequest(f"{reference!r}: {error}") from error
    except (LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        raise Unavailable(
            f"{model} cannot be fetched: the hub cannot be reached, and the local cache does not hold it "
            f"({_first_line(error)})"
        ) from error
    path = Path(directory)
    return Snapshot(path, model, path.name)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _reporting(progress: Progress) -> type[Any]:
    """The client takes a class of progress bars; this one draws nothing and passes the bytes on."""

    class Bar(hub_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("name") == "huggingface_hub.snapshot_download"
            self._num_bytes = 0
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # theirs

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes:
                self._num_bytes += int(n or 0)
                progress("download", self._num_bytes, int(self.total or 0))

    return Bar
