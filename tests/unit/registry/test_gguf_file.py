import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.errors import ModelFormatError
from headrace.registry import gguf_file

WriteGguf = Callable[..., Path]


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


HOSTILE = {
    "not GGUF": (b"GGML" + bytes(40), "does not start with"),
    "empty": (b"", "too short"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "many tensors": (header(2**63, 0), "9223372036854775808 tensors"),
    "many keys": (header(0, 2**62), "4611686018427387904 keys"),
    "a key beyond the end": (header(0, 1) + struct.pack("<Q", 1000), "truncated"),
    "a key of huge length": (header(0, 1) + struct.pack("<Q", 2**63), "at most 1024"),
    "a string of huge length": (header(0, 1) + key(b"k", 8, struct.pack("<Q", 2**60)), "truncated"),
    "a huge array": (header(0, 1) + key(b"k", 9, struct.pack("<IQ", 4, 2**62)), "truncated"),
    "a huge array of strings": (header(0, 1) + key(b"k", 9, struct.pack("<IQ", 8, 2**50)), "claims"),
    "nested arrays": (header(0, 1) + key(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(40)), "array of arrays"),
    "an unknown type": (header(0, 1) + key(b"k", 77, bytes(8)), "unknown type 77"),
    "a key twice": (header(0, 2) + key(b"k", 0, b"\1") * 2, "twice"),
    "a name that is not UTF-8": (header(0, 1) + key(b"\xff", 0, b"\1"), "not UTF-8"),
    "many dimensions": (header(1, 0) + text(b"t") + struct.pack("<I", 2**31), "dimensions"),
    "no dimensions": (header(1, 0) + text(b"t") + struct.pack("<IIQ", 0, 0, 0), "0 dimensions"),
    "an impossible shape": (header(1, 0) + text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "impossible"),
    "a size of zero": (header(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), "impossible"),
    "a tensor twice": (header(2, 0) + (text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2, "twice"),
    "no alignment": (header(0, 1) + key(b"general.alignment", 4, struct.pack("<I", 0)), "alignment"),
    "a huge alignment": (header(0, 1) + key(b"general.alignment", 4, struct.pack("<I", 2**31)), "alignment"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_name_and_the_reason(tmp_path: Path, case: str) -> None:
    data, reason = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=rf"hostile\.gguf: .*{reason}"):
        gguf_file.read(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    write_gguf: WriteGguf, tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "tiny.gguf"
    whole = path.read_bytes()[:6000] if path.exists() else write_gguf().read_bytes()[:6000]
    position = data.draw(st.integers(0, 400))
    patch = data.draw(st.binary(min_size=1, max_size=8))
    end = data.draw(st.integers(24, len(whole)))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes((whole[:position] + patch + whole[position + len(patch) :])[:end])
    with contextlib.suppress(ModelFormatError):
        assert len(gguf_file.read(damaged).metadata) <= gguf_file.MAX_KEYS


def test_the_right_file_is_read(write_gguf: WriteGguf) -> None:
    file = gguf_file.read(write_gguf("qwen2"))
    assert file.text("general.architecture") == "qwen2"
    assert file.integer("qwen2.embedding_length") == 64
    assert file.number("qwen2.rope.freq_base") == 10_000.0
    assert file.texts("tokenizer.ggml.tokens")[:2] == ["<|begin|>", "<|im_end|>"]
    assert file.tensors["blk.0.ffn_up.weight"].shape == (96, 64)


@pytest.mark.parametrize(
    "look",
    [
        lambda file: file.integer("general.architecture"),
        lambda file: file.integer("missing"),
        lambda file: file.number("missing"),
        lambda file: file.text("qwen2.embedding_length"),
        lambda file: file.texts("tokenizer.ggml.token_type"),
        lambda file: file.numbers("tokenizer.ggml.tokens"),
        lambda file: file.flag("general.architecture", default=True),
    ],
)
def test_a_value_of_another_type_is_refused(
    write_gguf: WriteGguf, look: Callable[[gguf_file.GgufFile], object]
) -> None:
    file = gguf_file.read(write_gguf("qwen2"))
    with pytest.raises(ModelFormatError, match="GGUF metadata"):
        look(file)
