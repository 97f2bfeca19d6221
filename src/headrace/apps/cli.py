"""The ``headrace`` command. Subcommands are imported only when used, so that ``--help`` is quick."""

import errno
import sys

from cyclopts import App

import headrace
from headrace.core.errors import HeadraceError

app = App(
    name="headrace",
    help="""Serve large language models behind an OpenAI-compatible API.

Start with `headrace up`: it runs the whole platform on this machine and prints an API key.""",
    version=headrace.__version__,
    help_format="markdown",
)

app.command("headrace.apps.up:up", name="up", help="Run the whole platform on this machine.")
app.command("headrace.apps.chat:chat", name="chat", help="Talk to a running gateway in this terminal.")
app.command("headrace.apps.model:app", name="model", help="Import models and list them.")
app.command("headrace.apps.key:app", name="key", help="Create and revoke API keys.")
app.command("headrace.apps.bench:app", name="bench", help="Measure a server or the engine.")
app.command("headrace.apps.gateway:gateway", name="gateway", help="Run one gateway process.")
app.command("headrace.apps.worker:worker", name="worker", help="Run one worker process.")
app.command("headrace.apps.tls:app", name="tls", help="Issue certificates for gateways and workers.")
app.command("headrace.apps.migrate:migrate", name="migrate", help="Bring the database schema up to date.")


_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Entry point. An error that a user can cause ends with its message and status 1; a defect shows its trace."""
    try:
        app()
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # A place that cannot be written or read, or a disk that is full; without a file it is a defect of ours.
        if error.filename is None and error.errno not in _FULL:
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"headrace: {place}{error.strerror}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
