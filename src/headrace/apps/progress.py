"""Progress of slow steps for the person who waits: live bars at a terminal, a line per step elsewhere."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from headrace.apps.logs import Progress as Report


class Steps:
    """A list of steps, each with a bar while it runs and its duration when it is done."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            SpinnerColumn(finished_text=Text("✓", "green")),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("[dim]{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._details: dict[str, tuple[TaskID, str]] = {}

    def __enter__(self) -> "Steps":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Report]:
        """One step. The value is a callback ``(detail, done, total)`` for steps that know how far they are."""
        started = time.monotonic()
        task = self._bars.add_task(title, total=None, detail="")
        if not self.console.is_terminal:
            self.console.print(f"{title} …")
        last_detail = ""

        def report(detail: str, done: int, total: int) -> None:
            nonlocal last_detail
            self._bars.update(task, detail=detail, completed=done, total=total or None)
            if not self.console.is_terminal and detail != last_detail:
                self.console.print(f"  {detail}")
            last_detail = detail

        yield report
        self._bars.update(task, total=1, completed=1, detail="")
        if not self.console.is_terminal:
            self.console.print(f"{title}: done in {time.monotonic() - started:.1f} s")
