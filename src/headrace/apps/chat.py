"""``headrace chat``: a conversation with a running gateway, streamed to the terminal."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from headrace.apps.client import Message, find_gateway
from headrace.core.errors import HeadraceError

HELP_LINE = "Type a message; /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    prompt: Annotated[str | None, Parameter(help="Ask this one thing, print the answer, and end.")] = None,
    *,
    model: Annotated[str | None, Parameter(help="Which model; default: the first that is served.")] = None,
    system: Annotated[str | None, Parameter(help="A system message to start with.")] = None,
    max_tokens: Annotated[int, Parameter(help="Limit of each answer.")] = 512,
    temperature: Annotated[float, Parameter(help="Small models stay on the subject at low temperatures.")] = 0.2,
    base_url: Annotated[str | None, Parameter(help="The gateway, e.g. http://localhost:8000/v1.")] = None,
    data: Annotated[Path | None, Parameter(help="Data directory of the `headrace up` to talk to.")] = None,
) -> None:
    """Talk to a running gateway in this terminal.

    Address and key come from the data directory of a local `headrace up`, or from `--base-url` and the environment
    variable `HEADRACE_API_KEY`.
    """
    gateway = find_gateway(base_url, data)
    name = model or gateway.models()[0]
    history = [Message("system", system)] if system else []
    if prompt is not None:
        asked = [*history, Message("user", prompt)]
        for piece in gateway.answer(name, asked, max_tokens=max_tokens, temperature=temperature):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    ask = functools.partial(gateway.answer, name, max_tokens=max_tokens, temperature=temperature)
    _converse(ask, f"[bold]{name}[/] at {gateway.base_url}", history)


def _converse(ask: Callable[[list[Message]], Iterator[str]], title: str, start: list[Message]) -> None:
    console = Console(highlight=False)
    is_person = sys.stdin.isatty()
    if is_person:
        console.print(f"{title}\n[dim]{HELP_LINE}[/]")
    history = list(start)
    while True:
        try:
            line = console.input("[bold cyan]you ›[/] " if is_person else "").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            history = list(start)
            console.print("[dim]forgotten[/]")
            continue
        if not line:
            continue
        asked, pieces = [*history, Message("user", line)], []
        try:
            for piece in ask(asked):
                pieces.append(piece)
                console.print(piece, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print("[dim] (stopped)[/]", end="")
        except HeadraceError as error:
            console.print(f"[red]{error}[/]", end="")
        console.print()
        if pieces:
            history = [*asked, Message("assistant", "".join(pieces))]
