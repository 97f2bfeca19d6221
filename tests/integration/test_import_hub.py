"""Fetching from a hub: the real client against a small hub on the loopback interface, and against none."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"x" * 100_000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"\x80\x04.",
    "modeling_custom.py": b"raise SystemExit",
    "onnx/model.onnx": b"y",
}
CLIENT = """
import sys
from headrace.core.errors import HeadraceError
from headrace.registry import hub

last = {}
try:
    found = hub.fetch(sys.argv[1], lambda stage, done, total: last.update({stage: (done, total)}))
    names = sorted(path.name for path in found.directory.iterdir())
    print("found", found.model, found.name, found.commit, *names, last)
except HeadraceError as error:
    print(type(error).__name__, error)
"""


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as the client asks for."""

    protocol_version = "HTTP/1.1"
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        type(self).asked.append(path)
        if path.startswith("/api/models/acme/tiny/revision/") and path.endswith(("/main", COMMIT)):
            self.answer(json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/acme/tiny/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif (name := path.removeprefix(f"/acme/tiny/resolve/{COMMIT}/")) in FILES:
            self.answer(FILES[name])
        elif "/acme/tiny/revision/" in path:
            self.refuse(404, "RevisionNotFound")
        elif "/acme/gated/" in path:
            self.refuse(403, "GatedRepo")
        else:
            self.refuse(404, "RepoNotFound")

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(home: Path, endpoint: str, reference: str) -> str:
    """What the importer says, in a process of its own: the client reads its environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, reference],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_files_that_make_a_model_are_fetched_and_the_commit_is_recorded(endpoint: str, tmp_path: Path) -> None:
    said = ask(tmp_path, endpoint, "acme/tiny")
    assert said.startswith(
        f"found acme/tiny tiny {COMMIT} config.json model.safetensors tokenizer.json {{'download': (1000"
    )
    fetched = [path for path in Hub.asked if "/resolve/" in path]
    assert not any(path.endswith((".bin", ".py", ".onnx")) for path in fetched)
    # What the cache holds serves without a hub.
    again = ask(tmp_path, "http://127.0.0.1:9", f"acme/tiny@{COMMIT}")
    assert again.startswith(f"found acme/tiny tiny {COMMIT}")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("acme/missing", "NotFound the hub has no model 'acme/missing'"),
        ("acme/tiny@no-such-branch", "NotFound the hub has acme/tiny, but not its revision 'no-such-branch'"),
        ("acme/gated", "Forbidden acme/gated is gated"),
        ("../../etc", "InvalidRequest '../../etc' is not of the form OWNER/MODEL[@REVISION]"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(endpoint: str, tmp_path: Path, reference: str, expected: str) -> None:
    assert ask(tmp_path, endpoint, reference).startswith(expected)


def test_without_a_hub_the_error_says_that_it_cannot_be_reached(tmp_path: Path) -> None:
    said = ask(tmp_path, "http://127.0.0.1:9", "acme/tiny")
    assert said.startswith("Unavailable acme/tiny cannot be fetched: the hub cannot be reached")
