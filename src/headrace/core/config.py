"""Typed configuration: one TOML file, one frozen type; an unknown key is an error that names the nearest right one."""

import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from headrace.core.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def load(path: Path, kind: type[T]) -> T:
    """Read ``path`` as TOML into ``kind``.

    Raises:
        ConfigError: the file is missing, is not TOML, has an unknown key, or a value of the wrong type. The message
            names the file, the key, the value, and what to do.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a configuration file is UTF-8 text; byte {error.start} is not") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return convert(table, kind, source=str(path))


def convert(table: dict[str, Any], kind: type[T], *, source: str) -> T:
    """Turn a parsed table into ``kind``; ``source`` names its origin in messages.

    Raises:
        ConfigError: as for :func:`load`.
    """
    _refuse_unknown(table, kind, source, prefix="")
    try:
        return msgspec.convert(table, kind, dec_hook=_path_in)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def dump(config: msgspec.Struct) -> str:
    """The TOML text that :func:`load` reads back as an equal ``config``. Nested structs become tables."""
    return "\n".join(_toml_lines(msgspec.to_builtins(config, enc_hook=_path_out), prefix="")) + "\n"


def _path_in(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"expected a {kind.__name__}, got {value!r}")


def _path_out(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a configuration cannot hold a {type(value).__name__}")


def _toml_lines(table: dict[str, Any], prefix: str) -> list[str]:
    lines = [
        f"{key} = {_toml_value(value)}" for key, value in table.items() if not _is_table(value) and value is not None
    ]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", *_toml_lines(value, f"{prefix}{key}.")]
        elif _is_table(value):
            for item in value:
                lines += ["", f"[[{prefix}{key}]]", *_toml_lines(item, f"{prefix}{key}.")]
    return lines


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are TOML's too, but for DEL, which TOML wants escaped.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _refuse_unknown(table: dict[str, Any], kind: type[msgspec.Struct], source: str, prefix: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else "known keys: " + ", ".join(sorted(fields))
            raise ConfigError(f"{source}: unknown key '{prefix}{key}'; {hint}")
        nested = _struct_in(fields[key])
        if nested is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                _refuse_unknown(item, nested, source, f"{prefix}{key}.")


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _struct_in(arg)) is not None), None)
