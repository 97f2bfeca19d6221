"""A private certificate authority for the links between gateways and workers.

Every component has a certificate whose DNS name is its role (``worker.headrace.internal``); both ends of a link check
the authority and the role, so a host on the same network is nobody until it was issued a certificate.
"""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.adapters.engine.tls import TlsFiles
from headrace.core.errors import ConfigError

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397
RENEW_BEFORE_DAYS = 30
ROLES = ("worker", "gateway")


def role_name(role: str) -> str:
    """The DNS name that stands for a role in certificates."""
    return f"{role}.headrace.internal"


def paths(directory: Path, role: str) -> TlsFiles:
    """Where a role's PEM files lie, whether they exist or not."""
    return TlsFiles(directory / "ca.pem", directory / f"{role}.pem", directory / f"{role}.key")


def ensure_authority(directory: Path) -> None:
    """Make a certificate authority in ``directory`` unless a valid one is there; only the owner can read its key.

    Raises:
        ConfigError: what is there is damaged; the message names the file to remove.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
    if certificate_path.exists() and key_path.exists() and not _expires_soon(certificate_path):
        return
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Headrace private authority")])
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_key(key_path, key)
    _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    for role in ROLES:  # what the former authority signed is worth nothing now
        paths(directory, role).cert.unlink(missing_ok=True)


def ensure_certificate(directory: Path, role: str) -> TlsFiles:
    """Issue a certificate for ``role`` from the authority in ``directory`` unless a valid one is there.

    Raises:
        ConfigError: there is no authority in ``directory``, a file there is damaged, or ``role`` is not one.
    """
    if role not in ROLES:
        raise ConfigError(f"'{role}' is not a role; certificates are issued for: {', '.join(ROLES)}")
    found = paths(directory, role)
    if found.cert.exists() and found.key.exists() and not _expires_soon(found.cert):
        return found
    try:
        authority_key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
        authority = _read_certificate(directory / "ca.pem")
    except OSError as error:
        raise ConfigError(f"{directory}: no certificate authority here: {error.strerror}: {error.filename}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{directory / 'ca.key'}: damaged; remove it to have a new authority made") from error
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{directory / 'ca.key'}: not an elliptic-curve key; remove it to have a new authority made")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Headrace {role}")])
    certificate = (
        _builder(subject, authority.subject, key.public_key(), CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(role_name(role))]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    _write_key(found.key, key)
    _write(found.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return found


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _expires_soon(path: Path) -> bool:
    certificate = _read_certificate(path)
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left < datetime.timedelta(days=RENEW_BEFORE_DAYS)


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: damaged, not a PEM certificate; remove it to have a new one made") from error


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(path, pem, 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.unlink(missing_ok=True)
    part.touch(mode=mode)
    part.write_bytes(data)
    part.rename(path)
