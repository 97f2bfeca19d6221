"""The few calls of the public API that commands make, and where the local gateway is."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from headrace.apps.local import DataDir, default_data_dir
from headrace.core.errors import ConfigError, Unavailable


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Gateway:
    """A gateway, asked synchronously."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self._client = httpx2.Client(
            headers={"authorization": f"Bearer {api_key}"}, timeout=httpx2.Timeout(10.0, read=120.0)
        )

    def models(self) -> list[str]:
        """Names of the models served now.

        Raises:
            Unavailable: the gateway cannot be reached, refuses, or serves no model.
        """
        with _reaching(self.base_url):
            answer = self._client.get(f"{self.base_url}/models")
        _raise_for(answer)
        names = [model["id"] for model in answer.json()["data"]]
        if not names:
            raise Unavailable(f"{self.base_url} serves no model right now; try again in a moment")
        return names

    def answer(self, model: str, messages: list[Message], *, max_tokens: int, temperature: float) -> Iterator[str]:
        """The pieces of the answer as they are generated."""
        body: dict[str, Any] = {
            "model": model,
            "messages": msgspec.to_builtins(messages),
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
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


def find_gateway(base_url: str | None, data: Path | None) -> Gateway:
    """The gateway at ``base_url``, or that of the local installation in ``data``.

    Raises:
        ConfigError: neither is known, or ``base_url`` came without a key in ``HEADRACE_API_KEY``.
    """
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
