import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ModelFormatError
from headrace.core.ids import Digest
from headrace.registry import manifest as manifests
from headrace.registry.manifest import ManifestFile

digests = st.text("0123456789abcdef", min_size=64, max_size=64).map(lambda digits: Digest(f"sha256:{digits}"))
names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}(\.[a-z]{1,5})?(/[a-z]{1,8})?", fullmatch=True)
entries = st.builds(ManifestFile, path=names, digest=digests, num_bytes=st.integers(0, 2**50))
ZERO = Digest("sha256:" + "0" * 64)


@given(files=st.lists(entries, unique_by=lambda file: file.path), data=st.data())
def test_the_version_depends_on_the_content_and_not_on_the_order(
    files: list[ManifestFile], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(files))
    one = manifests.make(files, source="s", licence="l")
    other = manifests.make(list(shuffled), source="s", licence="l")
    assert manifests.encode(one) == manifests.encode(other)
    assert manifests.version_id(one) == manifests.version_id(other)
    assert manifests.decode(manifests.encode(one)) == one
    assert len(manifests.version_id(one)) == 12
    assert manifests.digest(manifests.encode(one)).startswith(f"sha256:{manifests.version_id(one)}")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/", "a\0b"])
def test_a_path_that_could_leave_the_directory_is_refused(path: str) -> None:
    raw = {"format": 1, "files": [{"path": path, "digest": ZERO, "num_bytes": 1}], "source": "", "licence": ""}
    with pytest.raises(ModelFormatError, match="plain relative path"):
        manifests.decode(json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "format 2"),
        ({"surprise": 1}, "surprise"),
        ({"files": [{"path": "a", "digest": "md5:00", "num_bytes": 1}]}, "content address"),
        ({"files": [{"path": "a", "digest": ZERO, "num_bytes": -1}]}, "-1 bytes"),
        ({"files": [{"path": "a", "digest": ZERO, "num_bytes": 1}] * 2}, "twice"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(changes: dict[str, object], reason: str) -> None:
    raw = {"format": 1, "files": [], "source": "", "licence": "", **changes}
    with pytest.raises(ModelFormatError, match=reason):
        manifests.decode(json.dumps(raw).encode())
