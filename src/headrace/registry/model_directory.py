"""Which files of a Hugging Face directory make a model, and whether they fit together."""

import json
import re
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelFormatError, NotFound
from headrace.core.safetensors_header import read_header

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ALLOWED_PATTERNS = ("*.safetensors", INDEX, "*.json", "*.jinja", "merges.txt", "tokenizer.model", "README.md")
"""What is worth fetching from a hub."""

_OTHER = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_MAX_JSON_BYTES = 64 * 1024 * 1024
_SHARD = re.compile(r"[A-Za-z0-9._-]{1,255}\.safetensors")


def collect(directory: Path) -> dict[str, Path]:
    """The files of the model in ``directory``, by name: configuration, tokenizer, safetensors weights. Others are left.

    Every safetensors header is checked, and an index must agree with its shards.

    Raises:
        NotFound: ``directory`` is not there.
        ModelFormatError: a needed file is missing, damaged, or of a format that can run code.
    """
    if not directory.is_dir():
        raise NotFound(f"there is no directory {str(directory)!r}")
    try:
        weights = _weights(directory)
        config = read_json(_needed(directory, CONFIG, "it describes the architecture"))
        if not isinstance(config.get("model_type"), str):
            raise ModelFormatError(f"{CONFIG} has no model_type")
        tokenizer = _needed(
            directory,
            TOKENIZER,
            "save the tokenizer in its fast form: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
        )
        read_json(tokenizer)
        chosen = [CONFIG, TOKENIZER, *weights, *(name for name in _OTHER if (directory / name).is_file())]
        for name in chosen:
            if name.endswith(".json"):
                read_json(directory / name)
    except OSError as error:
        raise ModelFormatError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return {name: directory / name for name in sorted(set(chosen))}


def refused(path: Path) -> ModelFormatError:
    """The error for a file that is not imported, with what to do instead."""
    if path.suffix.lower() in _PICKLES:
        return ModelFormatError(
            f"{path.name} is in pickle format, which can run code when it is read, so it is not imported; "
            "save the model as safetensors: model.save_pretrained(DIRECTORY, safe_serialization=True)"
        )
    return ModelFormatError(
        f"{path.name} is not a model format that is read; give a directory in Hugging Face layout or a .gguf file"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 64 MiB.

    Raises:
        ModelFormatError: it is not one.
        OSError: the file cannot be read.
    """
    if (num_bytes := path.stat().st_size) > _MAX_JSON_BYTES:
        raise ModelFormatError(f"{path.name} has {num_bytes} bytes; at most {_MAX_JSON_BYTES} are read")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name} must hold a JSON object")
    return value


def _needed(directory: Path, name: str, why: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise ModelFormatError(f"there is no {name} in {str(directory)!r}; {why}")
    return path


def _weights(directory: Path) -> list[str]:
    if (directory / INDEX).is_file():
        return [INDEX, *_shards(directory)]
    if (directory / WEIGHTS).is_file():
        read_header(directory / WEIGHTS)
        return [WEIGHTS]
    pickles = sorted(path for path in directory.iterdir() if path.suffix.lower() in _PICKLES)
    if pickles:
        raise refused(pickles[0])
    raise ModelFormatError(f"there is neither {WEIGHTS} nor {INDEX} in {str(directory)!r}")


def _shards(directory: Path) -> list[str]:
    placement = read_json(directory / INDEX).get("weight_map")
    if not isinstance(placement, dict) or not placement:
        raise ModelFormatError(f"{INDEX} has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, shard in placement.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise ModelFormatError(f"{INDEX} places {tensor!r} in {shard!r}, which is not the name of a shard")
        shards.setdefault(shard, set()).add(tensor)
    for shard, tensors in shards.items():
        held = read_header(_needed(directory, shard, f"{INDEX} names it")).tensors.keys()
        if missing := sorted(tensors - held):
            raise ModelFormatError(f"{INDEX} places {missing[0]!r} in {shard}, which does not hold it")
        if extra := sorted(held - tensors):
            raise ModelFormatError(f"{shard} holds {extra[0]!r}, which {INDEX} does not place there")
    return sorted(shards)
