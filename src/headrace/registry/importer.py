"""From what a user has to a model directory: a Hugging Face directory, a GGUF file, a name on the hub, or the demo.

Only formats that cannot run code are read.
"""

import hashlib
import json
import re
from pathlib import Path

from headrace.core.errors import InvalidRequest, ModelFormatError, NotFound
from headrace.registry import demo, gguf_file, gguf_model, gguf_tokenizer, hub, model_directory
from headrace.registry.prepared import Prepared
from headrace.registry.progress import Progress

HUB_PREFIX = "hf:"
DEMO = "demo"
_GGUF_SUFFIX = ".gguf"
_QUANTIZATION = re.compile(r"[._-](?:i?q\d\w*|f16|f32|bf16|fp16|mxfp4)$", re.IGNORECASE)
_HASH_BYTES = 1024 * 1024


def prepare(source: str, scratch: Path, progress: Progress) -> Prepared:
    """Check, and where needed convert, ``source``; ``scratch`` is an empty directory that may be filled. Blocks.

    Raises:
        NotFound: ``source`` does not exist.
        ModelFormatError: it is not a model that can be imported; the message says why, and what to do.
        InvalidRequest: ``source`` is of no known form.
        Unavailable: the hub cannot be reached.
    """
    if source == DEMO:
        found = demo.find()
        prepared = _from_gguf(found.path, scratch, progress)
        return Prepared(prepared.files, found.source, demo.LICENCE, demo.NAME)
    if source.startswith(HUB_PREFIX):
        snapshot = hub.fetch(source.removeprefix(HUB_PREFIX), progress)
        files = model_directory.collect(snapshot.directory)
        return Prepared(
            files, f"{HUB_PREFIX}{snapshot.model}@{snapshot.commit}", _licence(snapshot.directory), snapshot.name
        )
    path = Path(source).expanduser()
    if path.is_dir():
        files = model_directory.collect(path)
        return Prepared(files, "a local directory", _licence(path), _slug(path.resolve().name))
    if path.suffix.lower() == _GGUF_SUFFIX and path.is_file():
        return _from_gguf(path, scratch, progress)
    if path.exists():
        raise model_directory.refused(path)
    raise NotFound(
        f"there is no model at {source!r}; give a directory in Hugging Face layout, a .gguf file, "
        f"{HUB_PREFIX}OWNER/MODEL[@REVISION], or {DEMO!r}"
    )


def _from_gguf(path: Path, scratch: Path, progress: Progress) -> Prepared:
    address = _sha256(path, progress)
    file = gguf_file.read(path)
    config = gguf_model.config(file)
    tokenizer, tokenizer_config = gguf_tokenizer.convert(file)
    generation = {"eos_token_id": gguf_tokenizer.end_token_ids(file)}
    if "bos_token_id" in config:
        generation["bos_token_id"] = config["bos_token_id"]  # type: ignore[assignment]
    contents = {
        "config.json": _json(config),
        "generation_config.json": _json(generation),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in contents.items():
        (scratch / name).write_bytes(content)
    gguf_model.convert(file, scratch / "model.safetensors", progress)
    files = model_directory.collect(scratch)
    name = _slug(_QUANTIZATION.sub("", path.stem))
    return Prepared(files, f"GGUF file sha256:{address}", file.text("general.license"), name)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


def _sha256(path: Path, progress: Progress) -> str:
    hasher = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            progress("hash", done, total)
    return hasher.hexdigest()


def _slug(text: str) -> str:
    """A model name made of ``text``."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    if not name:
        raise InvalidRequest(f"no model name can be made of {text!r}; give one")
    return name


def _licence(directory: Path) -> str:
    """The licence that the model card's front matter names, or none."""
    card = directory / "README.md"
    try:
        text = card.read_text(encoding="utf-8", errors="replace")[:16_384] if card.is_file() else ""
    except OSError as error:
        raise ModelFormatError(f"{card.name} cannot be read: {error.strerror}") from error
    front, separator, _ = text.removeprefix("---").partition("\n---")
    match = re.search(r"^license:\s*[\"']?([A-Za-z0-9._+-]+)", front, re.MULTILINE)
    return match[1] if text.startswith("---") and separator and match else ""
