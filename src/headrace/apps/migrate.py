"""``headrace migrate``: bring a database's schema up to date."""

from typing import Annotated

from cyclopts import Parameter

from headrace.adapters.store.migrate import migrate as apply_migrations


def migrate(
    database_url: Annotated[
        str, Parameter(help="postgresql://… with the right to create tables; not through a pooler.")
    ],
) -> None:
    """Bring the database schema up to date. Safe to run from several machines at once, and again."""
    apply_migrations(database_url)
