import ssl
from pathlib import Path

import pytest

from headrace.adapters.engine.tls import TlsFiles, client_context, server_context
from headrace.apps.pki import ensure_authority, ensure_certificate
from headrace.core.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    ensure_authority(tmp_path)
    return ensure_certificate(tmp_path, "worker")


@pytest.mark.parametrize("make", [client_context, server_context])
def test_both_ends_want_certificates_and_nothing_older_than_tls_1_3(make, files: TlsFiles) -> None:
    context = make(files)

    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.check_hostname is (make is client_context)


@pytest.mark.parametrize("make", [client_context, server_context])
@pytest.mark.parametrize("which", ["ca", "cert", "key"])
@pytest.mark.parametrize("content", [None, "", "not PEM"])
def test_files_that_do_not_work_are_named(make, files: TlsFiles, which: str, content: str | None) -> None:
    path: Path = getattr(files, which)
    path.unlink()
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=path.name):
        make(files)


def test_key_and_certificate_must_belong_together(files: TlsFiles, tmp_path: Path) -> None:
    other = ensure_certificate(tmp_path, "gateway")

    with pytest.raises(ConfigError, match="its unencrypted key"):
        server_context(TlsFiles(files.ca, files.cert, other.key))
