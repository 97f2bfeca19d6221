from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import convert, dump, load
from headrace.core.errors import ConfigError


class Inner(msgspec.Struct, frozen=True):
    num_slots: int = 4
    ratio: float = 0.5


class Item(msgspec.Struct, frozen=True):
    name: str
    enabled: bool = True


class Outer(msgspec.Struct, frozen=True):
    listen: str = "127.0.0.1:1"
    limit: int | None = None
    names: list[str] = []
    inner: Inner = Inner()
    items: list[Item] = []


def write(directory: Path, text: str | bytes) -> Path:
    path = directory / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_becomes_its_type(tmp_path: Path) -> None:
    text = (
        'listen = "x"\nnames = ["a", "b"]\n[inner]\nnum_slots = 9\n[[items]]\nname = "one"\n[[items]]\nname = "two"\n'
    )

    config = load(write(tmp_path, text), Outer)

    assert config == Outer("x", None, ["a", "b"], Inner(9), [Item("one"), Item("two")])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('lisen = "x"', "unknown key 'lisen'; did you mean 'listen'"),
        ("[inner]\nnum_slot = 1", "unknown key 'inner.num_slot'; did you mean 'inner.num_slots'"),
        ('[[items]]\nname = "a"\nenable = true', "did you mean 'items.enabled'"),
        ("zzz = 1", "known keys: .*inner.*limit"),
        ('limit = "many"', "limit"),
        ("listen = 3", "listen"),
        ("[[items]]\nenabled = true", "name"),
        ("listen = ", "not valid TOML"),
        (b'listen = "\xff"', "UTF-8"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError, match=complaint) as caught:
        load(path, Outer)

    assert str(path) in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml", Outer)


def test_messages_name_the_source() -> None:
    with pytest.raises(ConfigError, match="the command line"):
        convert({"limit": "x"}, Outer, source="the command line")


@given(
    st.builds(
        Outer,
        listen=st.text(),
        limit=st.none() | st.integers(-(2**63), 2**63 - 1),
        names=st.lists(st.text(), max_size=3),
        inner=st.builds(Inner, num_slots=st.integers(0, 100), ratio=st.floats(0, 1)),
        items=st.lists(st.builds(Item, name=st.text(), enabled=st.booleans()), max_size=3),
    )
)
def test_what_is_dumped_is_read_back(tmp_path_factory: pytest.TempPathFactory, config: Outer) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_text(dump(config), encoding="utf-8")

    assert load(path, Outer) == config
