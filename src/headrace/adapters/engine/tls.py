"""TLS contexts for the worker protocol: TLS 1.3, both ends show a certificate of one private CA."""

import ssl
from pathlib import Path

import msgspec

from headrace.core.errors import ConfigError


class TlsFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of PEM files."""

    ca: Path
    """Certificates of the authority that signs workers and gateways; no other is believed."""
    cert: Path
    """This process's certificate (and intermediate ones)."""
    key: Path
    """Its private key, not encrypted."""


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a worker that listens. The gateway's name is checked once a connection stands, by the worker service.

    Raises:
        ConfigError: a file is missing, is not PEM, or key and certificate do not belong together.
    """
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a gateway that connects; the worker's name is checked in the handshake.

    Raises:
        ConfigError: as for :func:`server_context`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = True
    return _load(context, files)


def _load(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    for path in (files.ca, files.cert, files.key):
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file; the worker protocol needs ca, cert and key in PEM form")
    try:
        context.load_verify_locations(cafile=files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{files.ca}: not a PEM file of certificates: {error}") from error
    try:
        # An encrypted key would make OpenSSL ask at the terminal; an empty answer makes it an error instead.
        context.load_cert_chain(files.cert, files.key, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{files.cert} and {files.key}: not a PEM certificate and its unencrypted key: {error}"
        ) from error
    return context
