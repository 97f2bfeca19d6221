"""``headrace worker``: one process around one engine."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import prometheus_client
import structlog
import uvloop
from cyclopts import Parameter

from headrace.adapters.engine.fake import FakeEngine
from headrace.adapters.engine.tls import server_context
from headrace.apps import logs
from headrace.apps.config import WorkerProcess
from headrace.apps.processes import die_with_parent, settle_garbage_collector
from headrace.apps.storage import STORE_RETRY_S, StorageConfig, wait_for_storage
from headrace.core.config import load
from headrace.core.errors import EngineDead, HeadraceError, StoreUnavailable
from headrace.ports.engine import Engine
from headrace.ports.store import ModelVersion
from headrace.worker.service import WorkerService

STUCK_STATUS = 70

log = structlog.get_logger(__name__)


def worker(config: Annotated[Path, Parameter(help="The TOML file of this worker.")]) -> None:
    """Run one worker process: load a model and serve it to gateways until SIGTERM.

    On SIGTERM it takes nothing new, finishes what runs, and ends; a second one ends it at once.
    """
    settings = load(config, WorkerProcess)
    logs.configure(settings.log, process=settings.name)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # a series for each series, read by nobody
    if settings.die_with_parent:
        die_with_parent()
    try:
        uvloop.run(_serve(settings))
    except EngineDead as error:
        log.error("the engine died", reason=str(error))
        sys.exit(1)
    except HeadraceError as error:
        log.error("cannot serve", reason=str(error))
        sys.exit(1)


async def _serve(settings: WorkerProcess) -> None:
    tls = server_context(settings.tls) if settings.tls is not None else None
    engine = await _make_engine(settings)
    service = WorkerService(engine, settings.worker, tls, on_stuck=_die_stuck)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if service.ready:
            log.info("draining")
            service.begin_drain()
        else:
            os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    settle_garbage_collector()
    await service.start()
    description = engine.describe()
    log.info("serving", address=str(service.address), **msgspec.to_builtins(description))
    with contextlib.suppress(asyncio.CancelledError):
        await service.serve()
    log.info("stopped")


async def _make_engine(settings: WorkerProcess) -> Engine:
    version, directory = await _find_model(settings.model, settings.storage)
    if settings.kind == "fake":
        return FakeEngine(msgspec.structs.replace(settings.fake, model=version.model, version=version.version))
    # torch is an optional part of the installation and takes seconds to import; the fake engine needs none of it.
    from headrace.engine.build import build

    def progress(stage: str, done: float) -> None:
        logs.log_progress(stage, round(100 * done), 100)

    return await asyncio.to_thread(build, directory, version.model, version.version, settings.engine, progress=progress)


async def _find_model(reference: str, storage: StorageConfig) -> tuple[ModelVersion, Path]:
    """The version and its files on this machine's disk; waits while the database is away."""
    while True:
        try:
            async with wait_for_storage(storage) as (_, registry):
                version = await registry.resolve(reference)
                return version, await registry.materialize(version, Path(storage.cache), logs.log_progress)
        except StoreUnavailable as error:
            log.warning("waiting for the database", reason=str(error))
            await asyncio.sleep(STORE_RETRY_S)


def _die_stuck(reason: str) -> None:
    """A stuck engine cannot be stopped in good order, and whoever supervises this process starts another."""
    log.critical("the engine is stuck", reason=reason)
    sys.stdout.flush()
    os._exit(STUCK_STATUS)
