"""What is printed to be copied must work when it is copied."""

import ast
import io
import shlex
from pathlib import Path

import msgspec
from rich.console import Console

from headrace.apps.local import DataDir, Ready
from headrace.apps.welcome import welcome

READY = Ready("http://127.0.0.1:8000/v1", "hr-0123456789abcdef-key", "hr-admin", {"up": 1, "worker-0": 2}, "m@123")


def printed(width: int) -> str:
    sink = io.StringIO()
    welcome(Console(file=sink, width=width, highlight=False), READY, DataDir(Path("data")), 1.0)
    return sink.getvalue()


def section(text: str, start: str) -> str:
    return text[text.index(start) :].split("\n\n")[0]


def test_the_curl_command_sends_valid_json_with_the_key() -> None:
    words = shlex.split(section(printed(40), "curl http"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert f"Authorization: Bearer {READY.api_key}" in words
    body = msgspec.json.decode(words[words.index("-d") + 1])
    assert body["model"] == "m"
    assert body["messages"][0]["role"] == "user"


def test_the_python_lines_are_python() -> None:
    code = section(printed(40), "from openai")
    ast.parse(code)
    assert READY.api_key in code
    assert len(code.splitlines()) <= 5
