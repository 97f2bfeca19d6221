"""The whole platform as one set of processes: started in order, kept up, stopped in order."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
from rich.console import Console
from rich.markup import escape

from headrace.adapters.store.embedded import EmbeddedPostgres
from headrace.adapters.store.migrate import migrate
from headrace.apps import pki
from headrace.apps.config import WorkerAddress
from headrace.apps.local import DataDir, Ready, WorkerEndpoint, write_private
from headrace.apps.localconfig import LOCAL_DRAIN_S, Local, gateway_config, worker_config
from headrace.apps.localsetup import ensure_keys, ensure_model, ensure_salt_secret
from headrace.apps.logs import Progress, readable
from headrace.apps.processes import Child
from headrace.apps.progress import Steps
from headrace.apps.storage import StorageConfig, StorageFile, open_storage
from headrace.apps.welcome import welcome
from headrace.core.config import dump
from headrace.core.errors import HeadraceError, Unavailable

READY_TIMEOUT_S = 900.0
MAX_FAILED_STARTS = 3
STOP_TIMEOUT_S = LOCAL_DRAIN_S + 5.0
"""Longer than a process takes to drain and to say goodbye; one that takes more is killed."""
WATCH_INTERVAL_S = 0.1
POSTGRES_RETRY_LIMIT_S = 10.0


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of ``headrace up``, checked."""

    host: str
    port: int
    num_workers: int
    num_gateways: int
    engine: Literal["native", "fake"]
    model: str | None
    dtype: Literal["bfloat16", "float32"]
    ready_file: Path | None


class _Service(msgspec.Struct, frozen=True):
    """A child and the address at which it says whether it is ready."""

    child: Child
    ready_url: str


class Platform:
    """Owns every child process from the first start to the last stop."""

    def __init__(self, options: UpOptions, directory: DataDir) -> None:
        self._options = options
        self._directory = directory
        self._console = Console(highlight=False)
        self._postgres = EmbeddedPostgres(directory.postgres)
        self._services: list[_Service] = []
        """Workers first, then gateways: the order of starting, and the reverse of stopping."""
        self._reports: dict[str, Progress] = {}
        self._returning: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Start everything, say so, keep it up until SIGINT or SIGTERM, stop everything.

        Raises:
            HeadraceError: something could not be started; what had started is stopped again.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        began = time.monotonic()
        self._unpublish()  # what a killed predecessor left there is not true
        try:
            await _unless(stop, self._serve(began))
        finally:
            await self._shut_down()

    async def _serve(self, began: float) -> None:
        ready = await self._start()
        welcome(self._console, ready, self._directory, time.monotonic() - began)
        await self._watch(ready)

    async def _start(self) -> Ready:
        with Steps(self._console) as steps:
            with steps.step("PostgreSQL"):
                database_url = await self._start_postgres()
                await migrate(database_url)
            storage = StorageConfig(database_url, str(self._directory.blobs), str(self._directory.cache))
            write_private(self._directory.storage, dump(StorageFile(storage)).encode())
            async with open_storage(storage) as (store, registry):
                credentials = await ensure_keys(store, self._directory)
                with steps.step("Model") as report:
                    version = await ensure_model(registry, self._options.model, report)
            local = Local(
                model=f"{version.model}@{version.version}",
                engine=self._options.engine,
                dtype=self._options.dtype,
                storage=storage,
                num_workers=self._options.num_workers,
                num_gateways=self._options.num_gateways,
                host=self._options.host,
                port=self._options.port,
                salt_secret=ensure_salt_secret(self._directory),
            )
            workers = self._make_services(local)
            for service in self._services:
                service.child.start()
            for service in self._services:
                with steps.step(service.child.name) as report:
                    self._reports[service.child.name] = report
                    await self._until_ready(service)
        host = "127.0.0.1" if self._options.host in ("0.0.0.0", "::") else self._options.host  # noqa: S104 – compared
        ready = Ready(
            base_url=f"http://{host}:{self._options.port}/v1",
            api_key=credentials.api_key,
            admin_key=credentials.admin_key,
            pids=self._pids(),
            model=local.model,
            workers=workers,
        )
        self._publish(ready)
        return ready

    async def _start_postgres(self) -> str:
        """Who is cancelled meanwhile leaves when the start has ended: only then can it be stopped."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._postgres.start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.gather(starting, return_exceptions=True)
            raise

    def _make_services(self, local: Local) -> list[WorkerEndpoint]:
        """Write one configuration file for each process, as an operator of a fleet would, and make its child."""
        tls = self._directory.tls
        pki.ensure_authority(tls)
        endpoints, addresses = [], []
        for index in range(local.num_workers):
            listen_port, http_port = _free_port(), _free_port()
            config = worker_config(local, index, pki.ensure_certificate(tls, "worker"), listen_port, http_port)
            addresses.append(WorkerAddress(config.name, f"127.0.0.1:{listen_port}"))
            endpoints.append(WorkerEndpoint(config.name, f"http://127.0.0.1:{http_port}/metrics"))
            self._add_service("worker", config.name, config, f"http://127.0.0.1:{http_port}/readyz")
        for index in range(local.num_gateways):
            internal_port = _free_port()
            gateway = gateway_config(local, index, pki.ensure_certificate(tls, "gateway"), addresses, internal_port)
            self._add_service("gateway", gateway.name, gateway, f"http://127.0.0.1:{internal_port}/readyz")
        return endpoints

    def _add_service(self, command: str, name: str, config: msgspec.Struct, ready_url: str) -> None:
        path = self._directory.run / f"{name}.toml"
        write_private(path, dump(config).encode())
        argv = [sys.executable, "-m", "headrace", command, str(path)]
        child = Child(name, argv, self._directory.logs / f"{name}.log", on_progress=self._on_progress)
        self._services.append(_Service(child, ready_url))

    def _on_progress(self, process: str, stage: str, done: int, total: int) -> None:
        if (report := self._reports.get(process)) is not None:
            report(stage, done, total)

    async def _until_ready(self, service: _Service) -> None:
        """Wait until a service answers 200 at its ready address.

        Raises:
            Unavailable: it ended several times, or was not ready in time; with the end of its log.
        """
        child, deadline = service.child, time.monotonic() + READY_TIMEOUT_S
        num_starts = child.num_starts
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while not await _answers(session, service.ready_url):
                if child.last_exit is not None and child.num_starts - num_starts > MAX_FAILED_STARTS:
                    raise Unavailable(
                        _obituary(child, f"ended {MAX_FAILED_STARTS} times with status {child.last_exit}")
                    )
                if time.monotonic() > deadline:
                    raise Unavailable(_obituary(child, f"was not ready after {READY_TIMEOUT_S:.0f} s"))
                await asyncio.sleep(0.05)

    async def _watch(self, ready: Ready) -> None:
        """Keep PostgreSQL up (children keep themselves up), and the ready file true."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._postgres.poll() is not None:
                await self._revive_postgres()
            if (pids := self._pids()) != ready.pids:
                for service in self._services:
                    name = service.child.name
                    if name in ready.pids and ready.pids[name] != pids.get(name) and name not in self._returning:
                        self._console.print(f"[yellow]{name} ended; starting it again[/]")
                        self._returning[name] = asyncio.create_task(self._announce_return(service))
                ready = msgspec.structs.replace(ready, pids=pids)
                self._publish(ready)

    async def _announce_return(self, service: _Service) -> None:
        """Say when a process that ended serves again."""
        began, name = time.monotonic(), service.child.name
        try:
            await self._until_ready(service)
            self._console.print(f"[green]{name} serves again[/] [dim]after {time.monotonic() - began:.1f} s[/]")
        except Unavailable as error:  # its supervision goes on
            self._console.print(f"[red]{escape(str(error))}[/]")
        del self._returning[name]

    async def _revive_postgres(self) -> None:
        """Start PostgreSQL again, for as long as it takes: gateways go on with what they know meanwhile."""
        self._console.print("[yellow]PostgreSQL ended; starting it again[/]")
        pause_s = WATCH_INTERVAL_S
        while True:
            try:
                await self._start_postgres()
            except HeadraceError as error:
                self._console.print(f"[yellow]PostgreSQL does not start: {escape(str(error))}[/]")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, POSTGRES_RETRY_LIMIT_S)
            else:
                return

    def _pids(self) -> dict[str, int]:
        pids = {"up": os.getpid()}
        if self._postgres.pid is not None:
            pids["postgres"] = self._postgres.pid
        pids.update((s.child.name, s.child.pid) for s in self._services if s.child.pid is not None)
        return pids

    def _publish(self, ready: Ready) -> None:
        data = msgspec.json.format(msgspec.json.encode(ready))
        for path in filter(None, (self._directory.ready, self._options.ready_file)):
            write_private(path, data)

    def _unpublish(self) -> None:
        for path in filter(None, (self._directory.ready, self._options.ready_file)):
            path.unlink(missing_ok=True)

    async def _shut_down(self) -> None:
        """Gateways drain and stop first, then workers, then the database."""
        if self._services:
            self._console.print("[dim]Stopping …[/]")
        self._unpublish()
        for kind in ("gateway", "worker"):
            children = [s.child for s in self._services if s.child.name.startswith(kind)]
            clean = await asyncio.gather(*(child.stop(STOP_TIMEOUT_S) for child in children))
            for child, ended in zip(children, clean, strict=True):
                if not ended:
                    self._console.print(
                        f"[yellow]{child.name} did not stop in {STOP_TIMEOUT_S:.0f} s and was killed[/]"
                    )
        await asyncio.to_thread(self._postgres.stop)


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Run ``work`` until it ends, or cancel it when ``stop`` is set."""
    running, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not running.done():
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _obituary(child: Child, what: str) -> str:
    lines = [line for line in map(readable, child.tail(40)) if line is not None]
    return "\n".join([f"{child.name} {what}; the end of its log, {child.log}:", *lines[-8:]])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
