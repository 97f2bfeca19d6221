"""A worker as a process of its own, and what its client sees when the process dies or freezes."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.adapters.engine.remote import RemoteConfig, RemoteEngine, connect
from headrace.core.errors import EngineDead
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import GenerationRequest, StopConditions

PROGRAM = """
import asyncio, signal, sys
from headrace.adapters.engine.fake import FakeConfig, FakeEngine
from headrace.worker.config import WorkerConfig
from headrace.worker.service import WorkerService

async def main():
    config = WorkerConfig(listen=sys.argv[1], http_listen=None, heartbeat_s=0.1)
    service = WorkerService(FakeEngine(FakeConfig(step_s=0.002)), config, on_stuck=sys.exit)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.begin_drain)
    await service.start()
    print("ready", flush=True)
    await service.serve()

asyncio.run(main())
"""


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, address(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert started.stdout is not None
    while (await asyncio.wait_for(started.stdout.readline(), 20)) != b"ready\n":
        assert started.returncode is None
    yield started
    with contextlib.suppress(ProcessLookupError):  # it may have ended without our having been told yet
        started.kill()
    await started.communicate()


def address(directory: Path) -> str:
    return f"unix:{directory}/w.sock"


async def connect_and_submit(directory: Path, max_tokens: int) -> RemoteEngine:
    engine = await connect(address(directory), config=RemoteConfig(silence_timeout_s=0.5))
    for index in range(20):
        stop = StopConditions(max_tokens)
        engine.submit(GenerationRequest(SequenceId(f"s{index}"), TenantId("t"), [20, index], stop))
    return engine


async def test_a_killed_worker_is_noticed_at_once(process: asyncio.subprocess.Process, tmp_path: Path) -> None:
    engine = await connect_and_submit(tmp_path, 4000)
    killed_at = 0.0
    with pytest.raises(EngineDead, match="was lost"):  # noqa: PT012 -- the death comes in the middle of the frames
        async for frame in engine.frames():
            if frame.step > 10 and not killed_at:
                os.kill(process.pid, signal.SIGKILL)
                killed_at = time.monotonic()

    assert time.monotonic() - killed_at < 2.0
    assert engine.load().credit == 0
    await engine.close()


async def test_a_frozen_worker_is_noticed_by_its_silence(process: asyncio.subprocess.Process, tmp_path: Path) -> None:
    engine = await connect_and_submit(tmp_path, 4000)
    frozen = False
    try:
        with pytest.raises(EngineDead, match="silent"):  # noqa: PT012 -- the silence comes in the middle of the frames
            async for frame in engine.frames():
                if frame.step > 10 and not frozen:
                    os.kill(process.pid, signal.SIGSTOP)
                    frozen = True
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await engine.close()


async def test_a_terminated_worker_finishes_what_it_has(process: asyncio.subprocess.Process, tmp_path: Path) -> None:
    engine = await connect_and_submit(tmp_path, 30)
    num_tokens = 0
    with pytest.raises(EngineDead, match="drained"):  # noqa: PT012 -- the goodbye comes after the last frame
        async for frame in engine.frames():
            if num_tokens == 0:
                os.kill(process.pid, signal.SIGTERM)
            num_tokens += sum(len(delta.token_ids) for delta in frame.deltas)

    assert num_tokens == 20 * 30
    assert await asyncio.wait_for(process.wait(), 10) == 0
    await engine.close()
