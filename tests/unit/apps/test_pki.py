import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.apps import pki
from headrace.core.errors import ConfigError


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    pki.ensure_authority(tmp_path / "tls")
    return tmp_path / "tls"


@pytest.mark.parametrize("role", pki.ROLES)
def test_certificate_is_signed_by_the_authority_and_names_the_role(directory: Path, role: str) -> None:
    issued = pki.ensure_certificate(directory, role)
    certificate = load(issued.cert)
    certificate.verify_directly_issued_by(load(issued.ca))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [pki.role_name(role)]
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca


def test_keys_are_readable_by_the_owner_only(directory: Path) -> None:
    pki.ensure_certificate(directory, "worker")
    for key in directory.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key


def test_valid_files_are_left_alone(directory: Path) -> None:
    first = pki.ensure_certificate(directory, "worker").cert.read_bytes()
    pki.ensure_authority(directory)
    assert pki.ensure_certificate(directory, "worker").cert.read_bytes() == first


def test_a_certificate_near_its_end_is_renewed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pki, "CERTIFICATE_DAYS", pki.RENEW_BEFORE_DAYS - 1)
    first = load(pki.ensure_certificate(directory, "worker").cert)
    monkeypatch.undo()
    second = load(pki.ensure_certificate(directory, "worker").cert)
    assert second.serial_number != first.serial_number
    left = second.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left.days > pki.RENEW_BEFORE_DAYS


def test_a_new_authority_voids_what_the_old_one_signed(directory: Path) -> None:
    pki.ensure_certificate(directory, "worker")
    (directory / "ca.key").unlink()
    pki.ensure_authority(directory)
    issued = pki.ensure_certificate(directory, "worker")
    load(issued.cert).verify_directly_issued_by(load(issued.ca))
    assert isinstance(load(issued.cert).public_key(), ec.EllipticCurvePublicKey)


def test_unknown_role_is_refused_by_name(directory: Path) -> None:
    with pytest.raises(ConfigError, match="'admin' is not a role"):
        pki.ensure_certificate(directory, "admin")


def test_missing_authority_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no certificate authority"):
        pki.ensure_certificate(tmp_path, "worker")


def ensure_all(directory: Path) -> None:
    pki.ensure_authority(directory)
    for role in pki.ROLES:
        pki.ensure_certificate(directory, role)


@pytest.mark.parametrize("content", [b"", b"zz", b"\xff", b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"])
@pytest.mark.parametrize("name", ["ca.pem", "ca.key", "worker.pem"])
def test_a_damaged_file_is_named(directory: Path, name: str, content: bytes) -> None:
    pki.ensure_certificate(directory, "worker")
    (directory / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: damaged.*remove it"):
        ensure_all(directory)
