"""`headrace up` as a person runs it: real processes, the real database, the demo model, kill -9."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest
from openai import APIError, OpenAI

from headrace.apps.local import Ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

START_TIMEOUT_S = 120.0


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


class Running:
    """One `headrace up` in a subprocess."""

    def __init__(self, data: Path, *flags: str) -> None:
        self.ready_file = data.parent / "ready.json"
        self.ready_file.unlink(missing_ok=True)
        self.output = data.parent / "up.txt"
        command = [sys.executable, "-m", "headrace", "up", "--data", str(data), "--ready-file", str(self.ready_file)]
        command += ["--port", str(free_port()), *flags]
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            until(lambda: self.ready_file.exists() or self.process.poll() is not None, START_TIMEOUT_S)
            assert self.process.poll() is None, self.output.read_text()
        except BaseException:
            self.stop()
            raise

    @property
    def ready(self) -> Ready:
        return msgspec.json.decode(self.ready_file.read_bytes(), type=Ready)

    def client(self, **options: object) -> OpenAI:
        return OpenAI(base_url=self.ready.base_url, api_key=self.ready.api_key, max_retries=0, timeout=30.0, **options)  # type: ignore[arg-type]

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """Ctrl-C, and wait for the end."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(40)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data directory for the module: the first start imports the model, later ones find it."""
    return tmp_path_factory.mktemp("up") / "data"


@contextlib.contextmanager
def running(data: Path, *flags: str) -> Iterator[Running]:
    up = Running(data, *flags)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.stop()


def ask(client: OpenAI, model: str, max_tokens: int = 8) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a colour."}],
        max_tokens=max_tokens,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


def test_a_real_model_answers_and_ctrl_c_leaves_nothing_behind(data: Path) -> None:
    with running(data) as up:
        model = up.ready.model
        first = ask(up.client(), model)
        assert first.strip()
        assert ask(up.client(), model.partition("@")[0]) == first
        children = up.descendants()
        assert {"up", "postgres", "worker-0", "gateway-0"} <= up.ready.pids.keys()
        assert up.stop() == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert not up.ready_file.exists()
    with running(data) as again:
        assert again.ready.api_key == up_key(data)
        assert ask(again.client(), model) == first


def up_key(data: Path) -> str:
    return str(msgspec.json.decode((data / "credentials.json").read_bytes())["api_key"])


def test_a_second_up_in_the_same_directory_is_refused_with_the_holder(data: Path) -> None:
    with running(data, "--engine", "fake") as up:
        command = [sys.executable, "-m", "headrace", "up", "--data", str(data), "--port", str(free_port())]
        second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == 1
        assert f"process {up.process.pid}" in second.stderr
        assert ask(up.client(), up.ready.model)


def test_a_busy_port_is_refused_before_anything_starts(data: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "headrace", "up", "--data", str(data), "--port", str(port)]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr


@pytest.mark.parametrize("victim", ["worker-0", "gateway-0", "postgres"])
def test_a_killed_process_comes_back_and_serves(data: Path, victim: str) -> None:
    with running(data, "--engine", "fake") as up:
        model, old = up.ready.model, up.ready.pids[victim]
        assert ask(up.client(), model)
        os.kill(old, signal.SIGKILL)
        until(lambda: up.ready.pids.get(victim, old) != old)
        until(lambda: answers(up, model))
        assert up.stop() == 0


def answers(up: Running, model: str) -> bool:
    try:
        return bool(ask(up.client(), model))
    except APIError:
        return False


def test_sigkill_of_the_parent_takes_every_child_along(data: Path) -> None:
    with running(data, "--engine", "fake") as up:
        children = up.descendants()
        assert len(children) >= 3
        up.process.kill()
        up.process.wait(10)
        until(lambda: not [child for child in children if child.is_running() and child.status() != "zombie"])
    with running(data, "--engine", "fake") as again:
        assert ask(again.client(), again.ready.model)


def test_two_workers_and_two_gateways_share_one_port(data: Path) -> None:
    with running(data, "--engine", "fake", "--workers", "2", "--gateways", "2") as up:
        assert {"worker-0", "worker-1", "gateway-0", "gateway-1"} <= up.ready.pids.keys()
        for _ in range(8):  # a new connection each time, so that both gateways are met
            assert ask(up.client(), up.ready.model)


def test_a_stream_cut_by_a_killed_worker_ends_with_an_honest_error(data: Path) -> None:
    with running(data, "--engine", "fake") as up:
        body = {"model": up.ready.model, "prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        body["max_tokens"] = 4000
        headers = {"authorization": f"Bearer {up.ready.api_key}"}
        lines = []
        with httpx2.stream("POST", f"{up.ready.base_url}/completions", json=body, headers=headers, timeout=20) as got:
            assert got.status_code == 200
            for line in got.iter_lines():
                if line.startswith("data: "):
                    if not lines:
                        os.kill(up.ready.pids["worker-0"], signal.SIGKILL)
                    lines.append(line)
        assert lines[-1] == "data: [DONE]"
        error = msgspec.json.decode(lines[-2][6:])["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert not any('"finish_reason":"' in line for line in lines)


async def test_chat_command_streams_an_answer(data: Path) -> None:
    with running(data) as up:
        chat = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", "chat", "Name a colour.", "--max-tokens", "8", "--data", str(data)),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await chat.communicate()
        assert chat.returncode == 0
        assert output.strip()
        assert up.process.poll() is None
