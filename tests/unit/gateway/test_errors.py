"""Errors on the wire, and the table of them in the documentation."""

import json
import re
from pathlib import Path

import pytest

from headrace.core import errors
from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    InvalidRequest,
    ModelFormatError,
    Overloaded,
    ProtocolError,
)
from headrace.gateway.errors import as_headrace, error_headers, error_json

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "api.md"


def all_errors(kind=HeadraceError):
    return [kind, *(error for sub in kind.__subclasses__() for error in all_errors(sub))]


def test_all_four_fields_are_always_there():
    assert json.loads(error_json(InvalidRequest("no", param="n"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    assert json.loads(error_json(Overloaded("full")))["error"]["param"] is None


@pytest.mark.parametrize(("seconds", "header"), [(0.001, b"1"), (1.2, b"2"), (59.5, b"60"), (1e6, b"60")])
def test_retry_after_is_whole_and_not_so_long_that_clients_give_up(seconds, header):
    assert (b"retry-after", header) in error_headers(Overloaded("full", retry_after_s=seconds))


def test_our_own_defects_tell_nothing():
    assert "secret" not in as_headrace(ValueError("secret")).message
    error = InvalidRequest("said")
    assert as_headrace(error) is error


def test_the_documentation_lists_every_error_with_its_status():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    never_answered = {ConfigError, ModelFormatError, ProtocolError}
    on_the_wire = {e for e in all_errors() if e.__module__ == errors.__name__} - never_answered
    assert rows == {error.code: str(error.status) for error in on_the_wire}
