"""A gateway behind a real HTTP server on loopback, over a real dispatcher and fake engines; the store is in memory."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import openai
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.core.clock import SystemClock
from headrace.core.errors import ModelNotFound, StoreUnavailable
from headrace.core.ids import Digest, KeyId, ModelName, TenantId, VersionId, WorkerId
from headrace.dispatch.config import DispatchConfig
from headrace.dispatch.dispatcher import Dispatcher
from headrace.gateway.app import create_app
from headrace.gateway.auth import new_key
from headrace.gateway.config import GatewayConfig
from headrace.gateway.deps import GatewayDeps
from headrace.gateway.server import GatewayServer
from headrace.ports.store import ApiKey, ModelVersion, Role

MODEL = "tiny"
VERSION = "abcdef012345"
CHATML = (
    "{% if messages[0].content == 'loop for ever' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(directory: Path) -> None:
    """A byte-level tokenizer without merges (a token is a byte), and a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))


class MemoryKeys:
    """The in-memory twin of ``ports.store.Keys``, with an outage to switch on."""

    def __init__(self) -> None:
        self.rows: dict[KeyId, ApiKey] = {}
        self.down = False
        self.num_lookups = 0

    async def add_tenant(self, tenant_id: TenantId, name: str) -> None:
        pass

    async def add_key(self, key: ApiKey) -> None:
        self.rows[key.key_id] = key

    async def find_key(self, key_id: KeyId) -> ApiKey | None:
        self.num_lookups += 1
        if self.down:
            raise StoreUnavailable("down")
        return self.rows.get(key_id)

    async def revoke_key(self, key_id: KeyId) -> None:
        key = self.rows[key_id]
        self.rows[key_id] = ApiKey(key.key_id, key.tenant_id, key.role, key.secret_sha256, key.created_at, revoked=True)


class MemoryModels:
    """Every version of the one model lies in the same directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.created_at: dict[str, float] = {}

    async def resolve(self, reference: str) -> ModelVersion:
        name, _, version = reference.partition("@")
        if name.startswith("missing"):
            raise ModelNotFound("no such model")
        created_at = self.created_at.get(version, 1_700_000_000.0)
        return ModelVersion(ModelName(name), VersionId(version), Digest("sha256:" + "0" * 64), 1, "test", created_at)

    async def materialize(
        self, version: ModelVersion, cache_dir: Path, *, only: Callable[[str], bool] | None = None
    ) -> Path:
        assert only is not None
        assert not only("model.safetensors")
        return self._directory


class Platform:
    """Everything that a test may poke at."""

    def __init__(self, directory: Path) -> None:
        self.keys = MemoryKeys()
        self.models = MemoryModels(directory)
        self.engines: dict[str, FakeEngine] = {}
        self.port = 0

    async def start(
        self,
        stack: contextlib.AsyncExitStack,
        workers: dict[str, FakeConfig] | None = None,
        *,
        dispatch: DispatchConfig | None = None,
        **limits: object,
    ) -> None:
        workers = {"w0": fake()} if workers is None else workers
        self.config = GatewayConfig(salt_secret="a secret of the tests", **{"startup_wait_s": 0.0, **limits})
        self.key, row = new_key(TenantId("tenant-a"), Role.TENANT, created_at=0.0)
        self.admin_key, admin = new_key(TenantId("operators"), Role.ADMIN, created_at=0.0)
        await self.keys.add_key(row)
        await self.keys.add_key(admin)
        self.key_id = row.key_id
        connectors = {WorkerId(name): self._connector(name, config) for name, config in workers.items()}
        self.dispatcher = Dispatcher(connectors, dispatch or DispatchConfig(reconnect_min_s=0.01), SystemClock())
        await self.dispatcher.start()
        stack.push_async_callback(self.dispatcher.close)
        self.app = create_app(
            GatewayDeps(
                keys=self.keys,
                registry=self.models,
                dispatcher=self.dispatcher,
                config=self.config,
                clock=SystemClock(),
                cache_dir=Path("unused"),
            )
        )
        self.server = GatewayServer(self.app)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = listener.getsockname()[1]
        self.serving = asyncio.create_task(self.server._serve([listener]))
        stack.push_async_callback(self.stop)
        if workers:
            await self.until(lambda: bool(self.app.models.served()))
        else:
            await self.until(lambda: self.server.started)

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.serving

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def client(self, **options: object) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self.key, max_retries=0, **options)

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.base_url, headers=self.headers, timeout=20)

    async def raw(self, data: bytes, *, until_closed: bool = True) -> bytes:
        """Send bytes, and read until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait for a condition of this process's state."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            await asyncio.sleep(0.002)

    def num_running(self) -> int:
        loads = [engine.load() for engine in self.engines.values()]
        return sum(load.num_running + load.num_waiting for load in loads)

    def _connector(self, name: str, config: FakeConfig) -> Callable[[], "asyncio.Future[FakeEngine]"]:
        async def connect() -> FakeEngine:
            self.engines[name] = FakeEngine(config, SystemClock())
            return self.engines[name]

        return connect


def fake(**options: object) -> FakeConfig:
    """A fake engine that speaks in letters and spaces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = tuple(i for i, char in enumerate(alphabet) if char in "abcdefghijklmnopqrstuvwxyzĠ")
    settings: dict[str, object] = {
        "model": ModelName(MODEL),
        "version": VersionId(VERSION),
        "vocab_size": 259,
        "token_ids": letters,
        "max_model_len": 2048,
    }
    return FakeConfig(**{**settings, **options})


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture
def fake_config() -> Callable[..., FakeConfig]:
    return fake


@pytest_asyncio.fixture(loop_scope="module")
async def launch(model_dir: Path) -> AsyncIterator[Callable[..., "asyncio.Future[Platform]"]]:
    """Start a platform with settings of the test: ``await launch({"w0": fake_config(...)}, **limits)``."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*args: object, **options: object) -> Platform:
            platform = Platform(model_dir)
            await platform.start(stack, *args, **options)
            return platform

        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def platform(model_dir: Path) -> AsyncIterator[Platform]:
    """One worker without delays, shared by the tests of a module; they leave it as it was."""
    async with contextlib.AsyncExitStack() as stack:
        platform = Platform(model_dir)
        await platform.start(stack)
        yield platform
