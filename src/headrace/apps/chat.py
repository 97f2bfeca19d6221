"""``headrace chat``: a conversation with a running gateway, streamed to the terminal."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx2
import msgspec
from cyclopts import Parameter
from rich.console import Console

from headrace.apps.local import DataDir, default_data_dir
from headrace.core.errors import ConfigError, HeadraceError, Unavailable

HELP_LINE = "Type a message; /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Gateway:
    """The two calls a chat needs, over the public API."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._client = httpx2.Client(
            headers={"authorization": f"Bearer {api_key}"}, timeout=httpx2.Timeout(10.0, read=120.0)
        )

    def models(self) -> list[str]:
        """Names of the models served now."""
        with _reaching(self.base_url):
            answer = self._client.get(f"{self.base_url}/models")
        _raise_for(answer)
        return [model["id"] for model in answer.json()["data"]]

    def answer(self, model: str, messages: list[Message], max_tokens: int | None) -> Iterator[str]:
        """The pieces of the answer as they are generated."""
        body: dict[str, Any] = {"model": model, "messages": msgspec.to_builtins(messages), "stream": True}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        with (
            _reaching(self.base_url),
            self._client.stream("POST", f"{self.base_url}/chat/completions", json=body) as got,
        ):
            if got.status_code != 200:
                got.read()
                _raise_for(got)
            for line in got.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = msgspec.json.decode(line[6:])
                if "error" in chunk:
                    raise Unavailable(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text


def chat(
    prompt: Annotated[str | None, Parameter(help="Ask this one thing, print the answer, and end.")] = None,
    *,
    model: Annotated[str | None, Parameter(help="Which model; default: the first that is served.")] = None,
    system: Annotated[str | None, Parameter(help="A system message to start with.")] = None,
    max_tokens: Annotated[int | None, Parameter(help="Limit of each answer.")] = None,
    base_url: Annotated[str | None, Parameter(help="The gateway, e.g. http://localhost:8000/v1.")] = None,
    data: Annotated[Path | None, Parameter(help="Data directory of the `headrace up` to talk to.")] = None,
) -> None:
    """Talk to a running gateway in this terminal.

    Address and key come from the data directory of a local `headrace up`, or from `--base-url` and the environment
    variable `HEADRACE_API_KEY`.
    """
    gateway = _find_gateway(base_url, data)
    served = gateway.models()
    if not served:
        raise Unavailable(f"{gateway.base_url} serves no model right now; try again in a moment")
    name = model or served[0]
    history = [Message("system", system)] if system else []
    if prompt is not None:
        for piece in gateway.answer(name, [*history, Message("user", prompt)], max_tokens):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    _converse(gateway, name, history, max_tokens)


def _converse(gateway: Gateway, model: str, start: list[Message], max_tokens: int | None) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{model}[/] at {gateway.base_url}\n[dim]{HELP_LINE}[/]")
    history = list(start)
    while True:
        try:
            line = console.input("[bold cyan]you ›[/] ").strip()
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
            for piece in gateway.answer(model, asked, max_tokens):
                pieces.append(piece)
                console.print(piece, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print("[dim] (stopped)[/]", end="")
        except HeadraceError as error:
            console.print(f"[red]{error}[/]", end="")
        console.print()
        if pieces:
            history = [*asked, Message("assistant", "".join(pieces))]


def _find_gateway(base_url: str | None, data: Path | None) -> Gateway:
    key = os.environ.get("HEADRACE_API_KEY")
    if base_url is not None:
        if key is None:
            raise ConfigError("--base-url also needs an API key in the environment variable HEADRACE_API_KEY")
        return Gateway(base_url, key)
    directory = data or default_data_dir()
    ready = DataDir(directory).read_ready()
    if ready is None:
        raise ConfigError(
            f"no running platform is known in {directory}; start one with `headrace up`, "
            "name its directory with --data, or give --base-url"
        )
    return Gateway(ready.base_url, key or ready.api_key)


@contextlib.contextmanager
def _reaching(base_url: str) -> Iterator[None]:
    """Turns a connection failure into a sentence that says what to check."""
    try:
        yield
    except httpx2.TransportError as error:
        raise Unavailable(f"cannot reach {base_url}: {error}; is `headrace up` running?") from error


def _raise_for(answer: httpx2.Response) -> None:
    if answer.status_code == 200:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise Unavailable(f"the gateway answered {answer.status_code}: {message}")
