"""What the benchmark scripts share: paths, the demo model, a platform to measure, results on disk."""

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.apps.local import Ready
from headrace.bench import machine
from headrace.bench.client import ClientOptions
from headrace.registry.importer import DEMO, prepare
from headrace.registry.progress import silent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
CACHE = ROOT / ".headrace" / "bench"

RUNNING = "headrace_worker_num_requests_running"
WORKER_IDLE = (RUNNING, "headrace_worker_num_requests_waiting", "headrace_worker_kv_cache_usage_perc")
GATEWAY_IDLE = ("headrace_requests_in_flight",)
"""Gauges that are 0 when nothing runs; anything else was leaked."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser whose help is the script's own docstring.

    Also makes SIGTERM end the script as an error would, so that what it started is stopped.
    """
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_model_dir(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--model-dir",
        type=Path,
        help="a Hugging Face model directory; default: the demo model, prepared once under .headrace/bench",
    )


def model_dir(chosen: Path | None) -> Path:
    """``chosen``, or the demo model as a model directory."""
    if chosen is not None:
        return chosen.resolve()
    directory = CACHE / "demo-model"
    if not directory.exists():
        console.print("preparing the demo model …")
        CACHE.mkdir(parents=True, exist_ok=True)
        # Prepared beside its place and renamed, so that an interrupted run leaves no half of a model behind.
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            (converted := Path(scratch) / "converted").mkdir()
            prepared = prepare(DEMO, converted, silent)
            model = Path(scratch) / "model"
            for name, path in prepared.files.items():
                (model / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, model / name)
            model.rename(directory)
    return directory


def save(name: str, result: object) -> Path:
    """Write ``result`` and the machine it was measured on to ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {"measured_at": time.time(), "commit": _commit(), "machine": machine.describe(), "result": result}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2))
    console.print(f"[dim]saved {path.relative_to(ROOT)}[/]")
    return path


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def finish(title: str, rows: list[tuple[str, str, str, bool | None]]) -> None:
    """Print figures beside their targets, ``(figure, measured, target, met)``, and exit: 1 if a target was missed.

    A figure without a target has None in ``met``.
    """
    table = Table("figure", "measured", "target", "", title=title, title_justify="left")
    for figure, measured, target, met in rows:
        table.add_row(figure, measured, target, {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[met])
    console.print(table)
    sys.exit(1 if any(met is False for *_, met in rows) else 0)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process that leads its own group, children of children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Platform:
    """A running ``headrace up`` and what its ready file says."""

    def __init__(
        self, process: subprocess.Popen[bytes], ready: Ready, ready_file: Path, log: Path, start_s: float
    ) -> None:
        self.process = process
        self.ready = ready
        self.ready_file = ready_file
        self.log = log
        self.start_s = start_s
        """From the launch of the command to the ready file."""

    def reread(self) -> Ready:
        """The ready file as it is now: process ids change when a process is started again."""
        self.ready = msgspec.json.decode(self.ready_file.read_bytes(), type=Ready)
        return self.ready

    def client(self, **changes: Any) -> ClientOptions:
        """How a load generator reaches this gateway."""
        values = {"base_url": self.ready.base_url, "model": self.ready.model, "api_key": self.ready.api_key}
        return ClientOptions(**(values | changes))

    def worker_metrics(self) -> dict[str, float]:
        """The workers' metrics, summed."""
        totals: dict[str, float] = {}
        for worker in self.ready.workers:
            for name, value in scrape(worker.metrics_url).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def gateway_metrics(self) -> dict[str, float]:
        return scrape(self.ready.base_url.removesuffix("/v1") + "/metrics")

    def leaks(self) -> list[str]:
        """What is still held although nothing runs; waits a few seconds for it to come back."""
        found: list[str] = []
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            try:
                found = self._held()
            except OSError as error:
                found = [f"metrics cannot be read: {error}"]
            if not found:
                break
            time.sleep(0.1)
        return found

    def _held(self) -> list[str]:
        self.reread()
        sources = ((self.worker_metrics(), WORKER_IDLE), (self.gateway_metrics(), GATEWAY_IDLE))
        return [
            f"{name} = {value:g}"
            for metrics, names in sources
            for name in names
            if (value := find_metric(metrics, name)) != 0
        ]


def headrace_up(arguments: list[str]) -> list[str]:
    """The command line of ``headrace up`` in this environment."""
    return [sys.executable, "-m", "headrace.apps.cli", "up", *arguments]


@contextmanager
def platform(
    *arguments: str,
    command: Callable[[list[str]], list[str]] = headrace_up,
    data: Path | None = None,
    cwd: Path = ROOT,
    start_timeout_s: float = 300.0,
) -> Iterator[Platform]:
    """Start ``headrace up`` on a free port, wait until it serves, and stop it in the end as Ctrl-C does.

    ``command`` turns arguments of ``headrace up`` into a command line; one other than the default chooses the data
    directory itself, else it is ``data`` or a new one.

    Raises:
        SystemExit: it does not serve in time or ends; its last lines of log are printed.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True) as scratch:
        ready_file, log = Path(scratch) / "ready.json", Path(scratch) / "up.log"
        words = [*arguments, "--port", str(free_port()), "--ready-file", str(ready_file)]
        if command is headrace_up:
            words += ["--data", str(data or Path(scratch) / "data")]
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(words), cwd=cwd, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            ready = _await_ready(process, ready_file, log, started + start_timeout_s)
            yield Platform(process, ready, ready_file, log, time.monotonic() - started)
        finally:
            stop(process)


def _await_ready(process: subprocess.Popen[bytes], ready_file: Path, log: Path, deadline: float) -> Ready:
    while time.monotonic() < deadline:
        if ready_file.exists():
            return msgspec.json.decode(ready_file.read_bytes(), type=Ready)
        if process.poll() is not None:
            break
        time.sleep(0.02)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    why = "did not serve in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise SystemExit(f"headrace up {why}; its last lines:\n{tail}")


def stop(process: subprocess.Popen[bytes], *, patience_s: float = 30.0) -> None:
    """End a process as Ctrl-C in a terminal would, which signals its group; after ``patience_s`` kill the group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            console.print("[red]headrace up did not stop at Ctrl-C; killing it[/]")
            kill_group(process)


def get(url: str, *, timeout_s: float = 10.0) -> bytes:
    """The body of a GET; raises ``OSError`` for every failure, also for a status other than 200."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        body: bytes = answer.read()
        return body


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def scrape(url: str) -> dict[str, float]:
    """Prometheus metrics by name, summed over labels."""
    totals: dict[str, float] = {}
    for name, value in _SAMPLE.findall(get(url).decode()):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def find_metric(metrics: dict[str, float], name: str) -> float:
    """A metric that must be there: failing loudly beats reading a missing gauge as zero."""
    if name not in metrics:
        raise SystemExit(f"the metric {name} is not exported; there are: {', '.join(sorted(metrics))}")
    return metrics[name]
