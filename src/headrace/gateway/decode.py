"""Bytes to wire types, with every complaint turned into an error that names the field."""

import json
import re
from typing import TypeVar

import msgspec

from headrace.core.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_MAX_NAME_CHARS = 64


def decode(body: bytes, kind: type[T]) -> T:
    """Read a JSON object into ``kind``.

    Raises:
        InvalidRequest: not JSON or not UTF-8, nested too deeply, a number that no float can hold, a field that does
            not exist, is missing, is given twice, or has another type. ``param`` names the field where there is one.
    """
    try:
        value = msgspec.json.decode(body, type=kind)
        # msgspec keeps the last of two equal keys; other parsers keep the first, so neither is what was meant.
        json.loads(body, object_pairs_hook=_refuse_duplicates)
    except msgspec.ValidationError as error:
        raise _translate(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"We could not parse the JSON body of your request: {error}.") from None
    except UnicodeDecodeError:
        raise InvalidRequest("We could not parse the JSON body of your request: it is not UTF-8.") from None
    except RecursionError:
        raise InvalidRequest("We could not parse the JSON body of your request: it is nested too deeply.") from None
    return value


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidRequest(f"'{_shorten(key)}' is given twice in one JSON object.", param=_shorten(key))
        seen.add(key)


def _translate(message: str) -> InvalidRequest:
    match = _AT.fullmatch(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    if unknown := _UNKNOWN.fullmatch(what):
        name = _join(path, unknown["name"])
        return InvalidRequest(f"Unrecognized request argument supplied: {name}", param=name)
    if missing := _MISSING.fullmatch(what):
        name = _join(path, missing["name"])
        return InvalidRequest(f"Missing required parameter: '{name}'.", param=name)
    if not path:
        return InvalidRequest(f"The body is not what this endpoint takes: {what}.")
    return InvalidRequest(f"Invalid value for '{_shorten(path)}': {what}.", param=_shorten(path))


def _join(path: str, name: str) -> str:
    return f"{path}.{_shorten(name)}" if path else _shorten(name)


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + "…"
