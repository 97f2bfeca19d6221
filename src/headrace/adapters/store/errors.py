"""Where the database's errors become ours; nothing of psycopg leaves this package."""

import contextlib
from collections.abc import Iterator

import psycopg
import psycopg_pool

from headrace.core.errors import ConfigError, InvalidRequest, StoreUnavailable

_LOST = (
    psycopg.OperationalError,  # no connection, or it broke; also what a server that shuts down says
    psycopg.InterfaceError,  # a connection that is closed already
    psycopg_pool.PoolTimeout,
    psycopg_pool.PoolClosed,
    psycopg_pool.TooManyRequests,
    TimeoutError,
    OSError,
)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn every way of not reaching the database into ``StoreUnavailable``.

    Raises:
        StoreUnavailable: the database cannot be reached, refuses us, is starting or stopping, or does not answer in
            time. What it said stands in the message; the driver gives no code to tell these apart.
        InvalidRequest: a value is none that the database can hold, such as text with a NUL.
        ConfigError: it has no schema, or an old one.
    """
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        raise ConfigError(f"the database has no schema yet, or an old one: {_first_line(error)}; migrate it") from error
    except psycopg.DataError as error:
        raise InvalidRequest(f"the database cannot hold a value: {_first_line(error)}") from error
    except _LOST as error:
        raise StoreUnavailable(f"the database cannot be reached: {_first_line(error)}", retry_after_s=1.0) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
