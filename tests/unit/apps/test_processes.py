import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.apps import processes
from headrace.apps.processes import Child

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BACKOFF_START_S", 0.01)


async def test_a_killed_child_comes_back_under_a_new_pid(tmp_path: Path) -> None:
    child = Child("c", python(SLEEP), tmp_path / "c.log")
    child.start()
    await until(lambda: child.pid is not None)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.pid not in (None, first))
    assert child.last_exit == -signal.SIGKILL
    assert child.num_starts == 2
    assert await child.stop(5.0)
    assert child.pid is None


async def test_stop_kills_a_child_that_ignores_the_request(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = Child("c", python(code), tmp_path / "c.log")
    child.start()
    await until(lambda: child.tail() == ["up"])
    assert not await child.stop(0.1)
    assert child.pid is None


async def test_stop_before_the_first_start_and_twice(tmp_path: Path) -> None:
    child = Child("c", python(SLEEP), tmp_path / "c.log")
    assert await child.stop(1.0)
    child.start()
    assert await child.stop(5.0)
    assert await child.stop(5.0)


async def test_progress_lines_reach_the_callback_and_other_lines_only_the_log(tmp_path: Path) -> None:
    lines = [
        '{"event": "progress", "stage": "weights", "done": 3, "total": 9}',
        '{"event": "other", "x": "progress"}',
        'not json but says "progress"',
        "x" * (2 << 20),
        '{"event": "progress", "stage": "weights", "done": 9, "total": 9}',
    ]
    path = tmp_path / "lines"
    path.write_text("\n".join(lines) + "\n")
    seen: list[tuple[str, str, int, int]] = []
    code = f"print(open({str(path)!r}).read(), end='', flush=True); import time; time.sleep(60)"
    child = Child("c", python(code), tmp_path / "c.log", on_progress=lambda *report: seen.append(report))
    child.start()
    await until(lambda: len(seen) == 2)
    await child.stop(5.0)
    assert seen == [("c", "weights", 3, 9), ("c", "weights", 9, 9)]


async def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOG_LIMIT_BYTES", 1000)
    child = Child("c", python("print('y' * 99 + '\\n', end='', flush=True);" * 50 + SLEEP), tmp_path / "c.log")
    child.start()
    await until(lambda: "up" in child.tail())
    await child.stop(5.0)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * 1100


async def test_a_child_that_died_comes_back_while_its_own_child_holds_the_pipe(tmp_path: Path) -> None:
    heir = f"import subprocess, sys, os; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
    code = f"{heir}; open({str(tmp_path / 'heirs')!r}, 'a').write(f'{{p.pid}} '); os._exit(3)"
    child = Child("c", python(code), tmp_path / "c.log")
    child.start()
    try:
        await until(lambda: child.num_starts == 2)
        assert child.last_exit == 3
    finally:
        await child.stop(5.0)
        for pid in (tmp_path / "heirs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


async def test_a_child_that_cannot_be_started_is_tried_again_and_its_log_says_why(tmp_path: Path) -> None:
    child = Child("c", [str(tmp_path / "missing")], tmp_path / "c.log")
    child.start()
    await until(lambda: child.num_starts == 2)
    await child.stop(5.0)
    assert child.last_exit == processes.NOT_STARTED
    assert "cannot be started" in child.tail()[0]


async def test_a_log_that_cannot_be_written_does_not_stop_the_supervision(tmp_path: Path) -> None:
    (tmp_path / "c.log").mkdir()
    child = Child("c", python("print('y' * 300_000); raise SystemExit(3)"), tmp_path / "c.log")
    child.start()
    await until(lambda: child.num_starts == 2)
    await child.stop(5.0)
    assert child.last_exit == 3


async def test_a_child_that_asked_for_it_dies_with_its_parent(tmp_path: Path) -> None:
    inner = (
        "from headrace.apps.processes import die_with_parent; die_with_parent(); print('ready', flush=True); " + SLEEP
    )
    outer = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    parent = await asyncio.create_subprocess_exec(*python(outer), stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    grandchild = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: not _alive(grandchild))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
