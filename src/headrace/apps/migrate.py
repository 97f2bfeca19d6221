"""``headrace migrate``: bring a database's schema up to date."""

import asyncio
from typing import Annotated

from cyclopts import Parameter

from headrace.adapters.store import migrate as migrations

Url = Annotated[str, Parameter(help="postgresql://… of a role that may create tables; direct, not through a pooler.")]


def migrate(database_url: Url) -> None:
    """Bring the database schema up to date. Safe to run from several machines at once, and again."""
    applied = asyncio.run(migrations.migrate(database_url))
    print("\n".join(f"applied {name}" for name in applied) or "up to date")
