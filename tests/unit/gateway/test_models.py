"""What is served, as the gateway knows it: loaded off the loop, tried again, resolved by name or version."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from headrace.core.errors import ModelNotFound, StoreUnavailable, Unavailable
from headrace.core.frames import EngineDescription
from headrace.core.ids import Digest, ModelName, VersionId
from headrace.gateway import models as gateway_models
from headrace.gateway.models import ModelDirectory, is_text_file
from headrace.ports.store import ModelVersion


class Fleet:
    def __init__(self, *served):
        self.engines = [engine(*one) for one in served]

    def served(self):
        return self.engines


def engine(model, version, max_model_len=100):
    return EngineDescription(model, VersionId(version), max_model_len, 10, 16, 8, 4, "none", "fake")


class Registry:
    def __init__(self, directory):
        self._directory = directory
        self.num_failures = 0
        self.num_loads = 0
        self.created_at = {}

    async def resolve(self, reference):
        name, _, version = reference.partition("@")
        if self.num_failures > 0:
            self.num_failures -= 1
            raise StoreUnavailable("down")
        created_at = self.created_at.get(version, 0.0)
        return ModelVersion(ModelName(name), VersionId(version), Digest("sha256:"), 1, "test", created_at)

    async def materialize(self, version, cache_dir, *, only=None):
        self.num_loads += 1
        return self._directory


@pytest.fixture
def registry(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return Registry(tmp_path)


async def loaded(directory, num_models):
    directory.refresh()
    async with asyncio.timeout(10):
        while len(directory.served()) != num_models:
            await asyncio.sleep(0.001)


async def test_nothing_was_served_yet(registry):
    directory = ModelDirectory(Fleet(), registry, Path())
    directory.refresh()
    with pytest.raises(Unavailable):
        directory.resolve("m")


async def test_a_model_whose_tokenizer_is_on_its_way_is_unavailable_and_then_there(registry):
    directory = ModelDirectory(Fleet(("m", "1")), registry, Path())
    directory.refresh()
    for reference in ("m", "m@1"):
        with pytest.raises(Unavailable):
            directory.resolve(reference)
    await loaded(directory, 1)
    for reference in ("m", "m@1"):
        assert directory.resolve(reference).version == "1"
    for reference in ("m@2", "m@", "m@1@", "@1", "@"):
        with pytest.raises(ModelNotFound):
            directory.resolve(reference)
    with pytest.raises(ModelNotFound, match="'m'"):
        directory.resolve("m@2")
    await directory.close()


async def test_a_load_that_fails_is_tried_again(registry, monkeypatch):
    monkeypatch.setattr(gateway_models, "_RETRY_FIRST_S", 0.001)
    registry.num_failures = 3
    directory = ModelDirectory(Fleet(("m", "1")), registry, Path())
    await loaded(directory, 1)
    assert registry.num_loads == 1
    await directory.close()


async def test_a_model_that_lost_its_workers_is_unavailable_and_needs_no_second_load(registry):
    fleet = Fleet(("m", "1"), ("other", "2"))
    directory = ModelDirectory(fleet, registry, Path())
    await loaded(directory, 2)
    fleet.engines = fleet.engines[1:]
    directory.refresh()
    for reference in ("m", "m@1"):
        with pytest.raises(Unavailable, match=f"'{reference}'"):
            directory.resolve(reference)
    with pytest.raises(ModelNotFound):
        directory.resolve("m@7")
    assert [model.name for model in directory.served()] == ["other"]
    fleet.engines.append(engine("m", "1"))
    directory.refresh()
    assert directory.resolve("m").version == "1"
    assert registry.num_loads == 2
    await directory.close()


async def test_the_newest_version_goes_by_the_name(registry):
    registry.created_at = {"1": 5.0, "2": 9.0, "3": 7.0}
    directory = ModelDirectory(Fleet(("m", "1"), ("m", "2"), ("m", "3")), registry, Path())
    await loaded(directory, 3)
    assert directory.resolve("m").version == "2"
    assert directory.resolve("m@1").version == "1"
    assert [model.version for model in directory.served()] == ["2", "3", "1"]
    await directory.close()


async def test_a_request_must_fit_on_every_worker_of_a_version(registry):
    directory = ModelDirectory(Fleet(("m", "1", 100), ("m", "1", 60), ("m", "1", 80)), registry, Path())
    await loaded(directory, 1)
    assert directory.resolve("m").max_model_len == 60
    assert registry.num_loads == 1
    await directory.close()


async def test_versions_that_are_gone_are_forgotten_in_time(registry):
    fleet = Fleet()
    directory = ModelDirectory(fleet, registry, Path())
    for version in range(20):
        fleet.engines = [engine("m", str(version))]
        await loaded(directory, 1)
    assert len(directory._loaded) <= 10
    await directory.close()


async def test_closing_stops_loading(registry, monkeypatch):
    registry.num_failures = 1000
    directory = ModelDirectory(Fleet(("m", "1")), registry, Path())
    directory.refresh()
    await directory.close()
    directory.refresh()
    assert not directory._loading


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("tokenizer.json", True),
        ("tokenizer_config.json", True),
        ("config.json", True),
        ("generation_config.json", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/rag.jinja", True),
        ("special_tokens_map.json", True),
        ("model.safetensors", False),
        ("model-00001-of-00002.safetensors", False),
        ("model.safetensors.index.json", False),
        ("README.md", False),
    ],
)
def test_gateways_fetch_no_weights(path, wanted):
    assert is_text_file(path) is wanted


async def test_waiting_for_a_first_model_is_bounded_and_ends_when_one_is_there(registry):
    fleet = Fleet()
    directory = ModelDirectory(fleet, registry, Path())
    directory.refresh()
    assert not await directory.wait_until_any(0.01)
    waiting = asyncio.create_task(directory.wait_until_any(10))
    fleet.engines.append(engine("m", "1"))
    directory.refresh()
    assert await waiting
    assert directory.resolve("m").version == "1"
    await directory.close()
