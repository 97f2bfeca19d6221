"""What a local installation keeps beside the database."""

from pathlib import Path

import pytest

from headrace.apps.local import DataDir
from headrace.apps.localsetup import ensure_salt_secret
from headrace.core.errors import ConfigError


def test_the_salt_secret_is_made_once(tmp_path: Path) -> None:
    secret = ensure_salt_secret(DataDir(tmp_path))
    assert len(secret) >= 16
    assert ensure_salt_secret(DataDir(tmp_path)) == secret


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b"\xff" * 40, "ä".encode() * 40])
def test_a_damaged_salt_secret_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "salt_secret").write_bytes(content)
    with pytest.raises(ConfigError, match=r"salt_secret: damaged.*remove it"):
        ensure_salt_secret(DataDir(tmp_path))
