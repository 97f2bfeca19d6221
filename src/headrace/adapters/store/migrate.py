"""The database schema as numbered SQL files, applied in order, once each, whoever comes first.

All pending files run in one transaction under a transaction-level advisory lock: several processes may start at once,
and a migration that fails leaves nothing behind. Works behind a transaction-mode pooler.
"""

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

import psycopg

from headrace.adapters.store.errors import translated
from headrace.core.errors import ConfigError

_LOCK = 0x48656164726163
"""The advisory lock's number: "Headrac" in ASCII; any constant that nobody else uses would do."""
_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file."""

    number: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def available() -> list[Migration]:
    """The migrations that this program carries, in order; their numbers run from 1 without gaps."""
    found = []
    for file in files("headrace.adapters.store").joinpath("sql/migrations").iterdir():
        if match := _NAME.fullmatch(file.name):
            found.append(Migration(int(match[1]), file.name, file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda migration: migration.number)


async def migrate(url: str, migrations: list[Migration] | None = None) -> list[str]:
    """Bring the database at ``url`` up to date; returns the names of the files applied now.

    Raises:
        ConfigError: an applied file was edited since, or the database was migrated by a later program.
        StoreUnavailable: the database cannot be reached.
    """
    wanted = available() if migrations is None else migrations
    with translated():
        connection = await psycopg.AsyncConnection.connect(
            url, connect_timeout=_CONNECT_TIMEOUT_S, prepare_threshold=None
        )
        async with connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            await connection.execute(
                "CREATE TABLE IF NOT EXISTS schema_migrations ("
                "number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL,"
                " applied_at timestamptz NOT NULL DEFAULT now())"
            )
            cursor = await connection.execute("SELECT number, name, checksum FROM schema_migrations ORDER BY number")
            applied = {number: (name, checksum) for number, name, checksum in await cursor.fetchall()}
            _check(wanted, applied)
            pending = [migration for migration in wanted if migration.number not in applied]
            for migration in pending:
                await connection.execute(migration.sql.encode())
                await connection.execute(
                    "INSERT INTO schema_migrations (number, name, checksum) VALUES (%s, %s, %s)",
                    (migration.number, migration.name, migration.checksum),
                )
    return [migration.name for migration in pending]


def _check(wanted: list[Migration], applied: dict[int, tuple[str, str]]) -> None:
    by_number = {migration.number: migration for migration in wanted}
    for number, (name, checksum) in applied.items():
        migration = by_number.get(number)
        if migration is None:
            raise ConfigError(
                f"the database has migration {name}, which this program does not know: it was migrated by a later "
                "version of Headrace; run that version, or use another database"
            )
        if migration.checksum != checksum:
            raise ConfigError(
                f"migration {name} was applied to the database and edited afterwards; restore the file, and put the "
                "change into a new one"
            )
