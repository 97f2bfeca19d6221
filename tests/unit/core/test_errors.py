import logging

import pytest

from headrace.core import errors
from headrace.core.errors import HeadraceError, InternalError, from_code


def _all(base: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in _all(child))]


KINDS = [kind for kind in _all(HeadraceError) if kind.__module__ == errors.__name__]


def test_the_drawing_shows_every_error() -> None:
    drawn = {word for word in (errors.__doc__ or "").split() if word.isidentifier()}

    assert {kind.__name__ for kind in KINDS} <= drawn


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in KINDS if kind is not HeadraceError]

    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not HeadraceError])
def test_an_error_survives_the_way_through_its_code(kind: type[HeadraceError]) -> None:
    error = from_code(kind.code, "what happened")

    assert type(error) is kind
    assert error.message == str(error) == "what happened"


@pytest.mark.parametrize("code", [None, "", "nobody knows this one"])
def test_an_unknown_code_is_an_internal_error(code: str | None) -> None:
    assert type(from_code(code, "x")) is InternalError


@pytest.mark.parametrize("kind", KINDS)
def test_status_and_log_level_fit_together(kind: type[HeadraceError]) -> None:
    assert 400 <= kind.status <= 599
    if kind.status < 500:
        assert kind.log_level == logging.INFO
    else:
        assert kind.log_level >= logging.WARNING
