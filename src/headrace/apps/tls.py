"""``headrace tls``: certificates for a fleet, from a private authority."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.apps import pki

app = App(name="tls", help="Issue certificates for gateways and workers.")


@app.command
def init(directory: Annotated[Path, Parameter(help="Where the authority's files go; made if missing.")]) -> None:
    """Make a certificate authority. Keep `ca.key` off the serving machines: whoever has it can issue certificates."""
    pki.ensure_authority(directory)
    print(f"authority: {directory / 'ca.pem'} (give this to every process), {directory / 'ca.key'} (keep this safe)")


@app.command
def issue(
    role: Annotated[str, Parameter(help="worker or gateway")],
    directory: Annotated[Path, Parameter(help="The authority's directory.")],
) -> None:
    """Issue a certificate for a role, or show the one that is still valid."""
    issued = pki.ensure_certificate(directory, role)
    print(f"certificate: {issued.cert}\nkey: {issued.key}")
